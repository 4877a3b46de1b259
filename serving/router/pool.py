"""The workers: who they are, which may get requests, and how much each has to do.

Pure bookkeeping on one thread, with the clock passed in: `monitor` asks workers how they are and
tells the pool, `forward` tells it what it sends them and what fails. All times are seconds.
"""

import contextlib
import dataclasses
import enum
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, model_validator


logger = logging.getLogger(__name__)

TYPICAL_PROMPT_TOKENS = 512  # of a request that came past this router
FAILED_POLLS_ALLOWED = 1


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class State(enum.Enum):
    """ONLINE workers get requests. A SUSPECT one just failed a request, a DRAINING one is about to
    end, an OFFLINE one does not answer, not yet or no more, or is not what it should be."""

    ONLINE = "online"
    DRAINING = "draining"
    SUSPECT = "suspect"
    OFFLINE = "offline"


_ADDRESS = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+):([0-9]{1,5})", re.ASCII | re.IGNORECASE)


def _host_and_port(address: str) -> str:
    """HOST:PORT in its usual form, or ValueError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) <= 65535:
        raise ValueError("must have a host and a port between 1 and 65535, and nothing else")
    return f"{match[1].lower()}:{int(match[2])}"


def worker_url(text: str) -> str:
    """A worker's URL in the form by which the pool knows it, or ValueError."""
    scheme, _, address = text.rstrip("/").partition("://")
    try:
        if scheme.lower() not in ("http", "https"):
            raise ValueError("must begin with http:// or https://")
        return f"{scheme.lower()}://{_host_and_port(address)}"
    except ValueError as error:
        raise ValueError(f"a worker's URL is http://HOST:PORT, got {text!r}: {error}") from None


def _transfer_address(text: str) -> str:
    try:
        return _host_and_port(text)
    except ValueError as error:
        raise ValueError(f"a transfer address is HOST:PORT: {error}") from None


def reason_of(error: Exception) -> str:
    """An error in one line; some of httpx's have no text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ").replace("\n", " ")


WorkerUrl = Annotated[str, AfterValidator(worker_url)]
TransferAddress = Annotated[str, AfterValidator(_transfer_address)]


class Registration(BaseModel):
    """What a worker says of itself when it starts and with every beat."""

    mode: Literal["prefill", "decode"]
    url: WorkerUrl
    transfer_address: TransferAddress | None = None

    @property
    def role(self) -> Role:
        return Role(self.mode)


class Deregistration(BaseModel):
    """What a worker says when it ends."""

    url: WorkerUrl


class WorkerStatus(BaseModel):
    """What a worker answers to `GET /disaggregation`."""

    mode: Literal["prefill", "decode", "null"]
    transfer_address: TransferAddress | None
    model: str
    page_size: int
    num_running: int
    num_waiting: int
    draining: bool

    @model_validator(mode="after")
    def _check(self) -> "WorkerStatus":
        if self.mode == "prefill" and self.transfer_address is None:
            raise ValueError("a prefill worker must have a transfer address")
        return self


@dataclasses.dataclass(frozen=True)
class Timing:
    """How often workers are polled, how soon those that get no requests, and after how long
    without a beat a registered one is forgotten."""

    poll: float = 5.0
    poll_of_others: float = 1.0
    silence: float = 10.0


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A worker at one moment.

    Attributes:
      num_requests: that this router has under way there, `num_tokens` about how many tokens their
        prompts have.
      num_others: requests of other clients, when the worker was last asked.
      num_failures: requests it has failed.
      error: why it is not online.
    """

    url: str
    role: Role
    state: State
    is_static: bool
    transfer_address: str | None
    model: str | None
    page_size: int | None
    num_requests: int
    num_tokens: int
    num_others: int
    num_failures: int
    error: str | None

    @property
    def num_requests_in_all(self) -> int:
        return self.num_requests + self.num_others

    @property
    def load(self) -> int:
        """Comparable among workers of a role: tokens for prefill, which works on prompts, and
        requests for decode, where each is a row of the batch whatever its length."""
        if self.role is Role.PREFILL:
            return self.num_tokens + self.num_others * TYPICAL_PROMPT_TOKENS
        return self.num_requests_in_all


@dataclasses.dataclass
class _Worker:
    """What `Snapshot` says, and when to do what. `next_poll` is infinite while one is under way."""

    url: str
    role: Role
    is_static: bool
    next_poll: float
    last_beat: float
    state: State = State.OFFLINE
    error: str | None = None
    failed_at: float = -math.inf
    num_failed_polls: int = 0
    transfer_address: str | None = None
    model: str | None = None
    page_size: int | None = None
    num_requests: int = 0
    num_tokens: int = 0
    num_others: int = 0
    num_failures: int = 0

    def snapshot(self) -> Snapshot:
        return Snapshot(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Snapshot)})

    def enter(self, state: State, error: str | None = None) -> None:
        if (state, error) != (self.state, self.error):
            level = logging.INFO if error is None else logging.WARNING
            reason = "" if error is None else f": {error}"
            logger.log(
                level, "%s worker %s is %s%s", self.role.value, self.url, state.value, reason
            )
        self.state, self.error = state, error

    def take(self, status: WorkerStatus) -> None:
        self.transfer_address = status.transfer_address
        self.model, self.page_size = status.model, status.page_size
        self.num_others = max(0, status.num_running + status.num_waiting - self.num_requests)
        self.num_failed_polls = 0
        self.enter(State.DRAINING if status.draining else State.ONLINE)


class Pool:
    """Static workers stay for ever, registered ones as long as they are heard of."""

    def __init__(
        self,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        *,
        timing: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`prefill` and `decode` are the static workers' URLs, all different."""
        self._timing = timing or Timing()
        self.clock = clock
        now = clock()
        self._workers = {
            worker_url(url): _Worker(worker_url(url), role, True, now, now, error="not asked yet")
            for role, urls in ((Role.PREFILL, prefill), (Role.DECODE, decode))
            for url in urls
        }
        if len(self._workers) < len(prefill) + len(decode):
            raise ValueError(f"a worker is given twice: {', '.join([*prefill, *decode])}")

    def workers(self) -> list[Snapshot]:
        return [worker.snapshot() for worker in self._known()]

    def online(self, role: Role, but: Collection[str] = ()) -> list[Snapshot]:
        """The workers that may get a request, without those of these URLs."""
        return [
            worker
            for worker in self.workers()
            if worker.role is role and worker.state is State.ONLINE and worker.url not in but
        ]

    def missing(self) -> list[Role]:
        """The roles without an online worker."""
        return [role for role in Role if not self.online(role)]

    @contextlib.contextmanager
    def holding(self, url: str, num_tokens: int) -> Iterator[None]:
        """Counts a request with about so many prompt tokens as under way at a worker."""
        worker = self._workers.get(url)
        if worker is None:  # forgotten since it was chosen
            yield
            return
        worker.num_requests += 1
        worker.num_tokens += num_tokens
        try:
            yield
        finally:
            worker.num_requests -= 1
            worker.num_tokens -= num_tokens

    def suspect(self, url: str, reason: str) -> None:
        """A request failed there: it gets no other until it is heard of again, which is soon."""
        worker = self._workers.get(url)
        if worker is None:
            return
        now = self.clock()
        worker.num_failures += 1
        worker.failed_at = now
        worker.next_poll = min(worker.next_poll, now + self._timing.poll_of_others)
        if worker.state is not State.OFFLINE:
            worker.enter(State.SUSPECT, reason)

    def due(self) -> list[str]:
        """The workers to be asked now. What comes of it must be told, for each of them."""
        now = self.clock()
        due = [worker for worker in self._known() if worker.next_poll <= now]
        for worker in due:
            worker.next_poll = math.inf
        return [worker.url for worker in due]

    def heard(self, url: str, status: WorkerStatus, asked_at: float) -> None:
        """A worker answered a question asked at `asked_at`; what failed since counts for more."""
        worker = self._workers.get(url)
        if worker is None:
            return
        if status.mode != worker.role.value:
            worker.enter(State.OFFLINE, f"its mode is {status.mode}")
        elif asked_at >= worker.failed_at:
            worker.take(status)
        self._plan_poll(worker)

    def not_heard(self, url: str, reason: str) -> None:
        """A worker did not answer as it should."""
        worker = self._workers.get(url)
        if worker is None:
            return
        worker.num_failed_polls += 1
        if worker.num_failed_polls > FAILED_POLLS_ALLOWED:
            worker.enter(State.OFFLINE, reason)
        self._plan_poll(worker)

    def beat(self, registration: Registration) -> bool:
        """A worker lives. False: it must be asked and registered first, as it is not known like
        this or was thought dead."""
        worker = self._workers.get(registration.url)
        if (
            worker is None
            or worker.state is State.OFFLINE
            or worker.role is not registration.role
            or worker.transfer_address != registration.transfer_address
        ):
            return False
        worker.last_beat = self.clock()
        if worker.state is State.SUSPECT:
            worker.enter(State.ONLINE)
        return True

    def register(self, registration: Registration, status: WorkerStatus) -> None:
        """Take a worker that answered so. Raises ValueError for one that is not what it says."""
        url, role = registration.url, registration.role
        if status.mode != role.value:
            raise ValueError(f"{url} registers as {role.value}, but its mode is {status.mode}")
        if status.transfer_address != registration.transfer_address:
            raise ValueError(
                f"{url} registers with transfer address {registration.transfer_address}, but says "
                f"it is {status.transfer_address}"
            )
        now = self.clock()
        worker = self._workers.get(url)
        if worker is not None and worker.is_static and worker.role is not role:
            raise ValueError(
                f"{url} registers as {role.value}, but is here for {worker.role.value}"
            )
        if worker is None or worker.role is not role:
            worker = self._workers[url] = _Worker(url, role, False, now, now)
        worker.last_beat = now
        worker.take(status)
        self._plan_poll(worker)

    def deregister(self, url: str) -> None:
        """A worker says that it ends."""
        worker = self._workers.get(url)
        if worker is not None:
            worker.failed_at = self.clock()
            worker.enter(State.OFFLINE, "it has deregistered")
            self._forget_unless_static(worker)

    def _known(self) -> list[_Worker]:
        """All but the registered ones that have been silent for too long."""
        earliest = self.clock() - self._timing.silence
        for worker in list(self._workers.values()):
            if not worker.is_static and worker.last_beat < earliest:
                worker.enter(State.OFFLINE, f"no beat for {self._timing.silence:g} s")
                self._forget_unless_static(worker)
        return list(self._workers.values())

    def _forget_unless_static(self, worker: _Worker) -> None:
        if not worker.is_static:
            del self._workers[worker.url]

    def _plan_poll(self, worker: _Worker) -> None:
        is_used = worker.state in (State.ONLINE, State.DRAINING)
        after = self._timing.poll if is_used else self._timing.poll_of_others
        worker.next_poll = self.clock() + after
