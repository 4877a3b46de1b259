"""The serving loop: one thread that takes requests in, steps, and hands tokens out.

Commands (submit, abort, flush) cross to the thread through one queue and are carried out between
steps, so a cancelled request is gone within one step. Everything behind that queue, scheduler,
engine and requests alike, is touched by the loop's thread only.

The loops of a group's members go in lockstep: before each step all propose what they could do and
`serving.lockstep` decides for all. A member without work takes part with an empty batch. What
changes the group, the end, an empty cache, a mended failure, is decided in the same way.

    submit -> waiting -> prefill chunks -> decode steps -> last Output
"""

import collections
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from serving.engine import Engine, StepResult
from serving.kv_transfer.arrivals import Arrival, ArrivedPages, ArrivedToken, Fetches, Lost
from serving.lockstep import Decision, Proposal, Rebalance, Record, decide
from serving.metrics import LoopMetrics
from serving.peers import Peers
from serving.rebalancer import Rebalancer
from serving.recorder import Recorder
from serving.request import FinishReason, Output, Phase, Request, TokenLogprob
from serving.scheduler import Scheduler, StepPhase


logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3
RETRY_AFTER_SECONDS = 1


class QueueFullError(RuntimeError):
    """The waiting queue has no room; try again after `retry_after` seconds."""

    retry_after = RETRY_AFTER_SECONDS


@runtime_checkable
class Text(Protocol):
    """A request's text so far (`serving.text.TextStream`)."""

    matched: str | None

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclasses.dataclass
class _Active:
    """A request in the loop's hands, with what only the loop keeps about it."""

    request: Request
    text: Text
    submitted: float
    started: float | None = None
    last_token: float | None = None


class ServingLoop:
    """Thread-safe front of the serving thread.

    `make_text(stop)` gives a fresh text stream for a request with these stop strings. On a decode
    worker `fetcher` brings what prefill workers compute.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        make_text: Callable[[tuple[str, ...]], Text],
        metrics: LoopMetrics,
        peers: Peers,
        *,
        eos_token_ids: tuple[int, ...],
        max_queued: int,
        recorder: Recorder,
        rebalancer: Rebalancer | None = None,
        fetcher: Fetches | None = None,
    ):
        self._engine = engine
        self._scheduler = scheduler
        self._make_text = make_text
        self._metrics = metrics
        self._peers = peers
        self._recorder = recorder
        self._rebalancer = rebalancer
        self._fetcher = fetcher
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_queued = max_queued
        self._active: dict[str, _Active] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="serving-loop", daemon=True)
        self._lock = threading.Lock()
        # Shared with the callers' threads, under the lock: ids accepted and unfinished, requests
        # still in `_commands`, requests in the scheduler's queue after the last step.
        self._rids: set[str] = set()
        self._num_arriving = 0
        self._num_waiting = 0
        self._accepting = True
        self.error: str | None = None
        self._watcher: Callable[[], None] = lambda: None
        # Of the loop's thread: what it will propose besides work, and what it has seen.
        self._stop = False
        self._flushes: list[Future[None]] = []
        self._records: collections.deque[tuple[Record, Future[list[str]]]] = collections.deque()
        self._failure: Exception | None = None
        self._failures = 0
        self._last_phase: StepPhase | None = None

    def start(self) -> None:
        self._thread.start()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call this on the loop's thread whenever the properties or `error` may have changed.

        It must not block. To be set before `start`.
        """
        self._watcher = watcher

    @property
    def is_accepting(self) -> bool:
        """Whether it takes requests in."""
        return self._accepting

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return self._num_arriving + self._num_waiting

    @property
    def num_running(self) -> int:
        with self._lock:
            return len(self._rids) - self._num_arriving - self._num_waiting

    def submit(self, requests: list[Request]) -> None:
        """Take in all of these requests or none.

        Raises QueueFullError, ValueError for an id that is in use, RuntimeError when the loop is
        shutting down or has died.
        """
        with self._lock:
            if self.error is not None:
                raise RuntimeError(f"the serving loop has stopped: {self.error}")
            if not self._accepting:
                raise RuntimeError("the server is shutting down")
            num_waiting = self._num_arriving + self._num_waiting
            if num_waiting + len(requests) > self._max_queued:
                raise QueueFullError(
                    f"{num_waiting} requests are waiting and {self._max_queued} may; "
                    f"{len(requests)} more do not fit"
                )
            rids = [request.rid for request in requests]
            if len(set(rids)) != len(rids) or not self._rids.isdisjoint(rids):
                used = next(rid for rid in rids if rid in self._rids or rids.count(rid) > 1)
                raise ValueError(f"rid {used!r} is in use by another request")
            self._rids.update(rids)
            self._num_arriving += len(requests)
            now = time.monotonic()
            # Inside the lock, so that a dying loop finds every accepted request in its queue.
            self._command(lambda: self._add(requests, now))

    def abort(self, rid: str) -> bool:
        """End this request within one step; False when there is none of this id."""
        with self._lock:
            known = rid in self._rids
        if known:
            self._command(lambda: self._abort(rid))
        return known

    def abort_all(self) -> int:
        """End every request within one step; how many there were."""
        with self._lock:
            rids = list(self._rids)
        for rid in rids:
            self._command(lambda rid=rid: self._abort(rid))
        return len(rids)

    def flush_cache(self) -> None:
        """Forget everything cached, on all members. Raises RuntimeError while any serves a
        request."""
        done: Future[None] = Future()
        self._ask(lambda: self._flushes.append(done))
        done.result(timeout=60)

    def record(self, what: Record) -> list[str]:
        """Start, stop or dump a recording of the expert distribution, on all members.

        Returns the files that a dump has written. Raises RuntimeError when it cannot be done now,
        OSError when a file cannot be written.
        """
        done: Future[list[str]] = Future()
        self._ask(lambda: self._records.append((what, done)))
        return done.result(timeout=600)

    def _ask(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self.error is not None:
                raise RuntimeError(f"the serving loop has stopped: {self.error}")
            if not self._accepting:
                raise RuntimeError("the server is shutting down")
            self._command(command)

    def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Take no more requests; those under way may finish for this many seconds.

        Returns when all members have been asked to shut down, or the loop has died.
        """
        with self._lock:
            self._accepting = False
        deadline = time.monotonic() + drain_timeout
        while self._rids and self.error is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self.abort_all()
        self._command(self._request_stop)
        if self._thread.is_alive():
            self._thread.join()

    def abandon(self, reason: str, timeout: float = 0.0) -> None:
        """Let the loop die before its next step, without the other members' consent.

        Waits for that at most `timeout` seconds.
        """
        self._command(lambda: _raise(RuntimeError(reason)))
        if self._thread.is_alive() and timeout:
            self._thread.join(timeout)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._peers.wake()

    # Everything below runs on the loop's thread.

    def _run(self) -> None:
        try:
            while self._advance():
                pass
        except Exception as error:
            logger.exception("the serving loop died")
            self._die(f"{type(error).__name__}: {error}")

    def _advance(self) -> bool:
        """Do what all members decide on next; False when that is to stop."""
        self._take_commands()
        if self._fetcher is not None:
            self._fetch(self._fetcher)
        decision = self._decide()
        if decision.recover:
            self._recover()
            return True
        if decision.flush:
            self._flush(decision.num_active)
        if decision.record is not Record.NOTHING:
            self._record(decision.record)
            return True
        if self._rebalancer is not None and not self._rebalance(decision.rebalance):
            return True
        if decision.phase is not None:
            self._step(decision.phase, decision.size)
        elif decision.stop:
            return False
        elif decision.rebalance is not Rebalance.GO_ON:
            self._scheduler.check_integrity()
            self._publish()
            self._peers.wait()
        return True

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _decide(self) -> Decision:
        work = self._scheduler.propose()
        mine = Proposal(
            work.prefill_tokens,
            work.decode_rows,
            num_active=len(self._active),
            stop=int(self._stop),
            flush=int(bool(self._flushes)),
            failed=int(self._failure is not None),
            rebalance=Rebalance.WAIT if self._rebalancer is None else self._rebalancer.wish,
            record=self._records[0][0] if self._records else Record.NOTHING,
        )
        proposals = [Proposal(*values) for values in self._peers.agree(mine)]
        return decide(proposals, self._last_phase)

    def _step(self, phase: StepPhase, size: int) -> None:
        self._last_phase = phase
        batch = self._scheduler.next(phase)
        self._publish()
        started = time.monotonic()
        results: list[StepResult] | None = None
        for request in batch.all_requests:
            active = self._active[request.rid]
            active.started = active.started or started
        try:
            results = self._engine.run(batch, size)
            self._send_pages(results)
        except Exception as error:
            results = None
            self._fail(batch.all_requests, error)
        if self._rebalancer is not None:
            self._rebalancer.step(time.monotonic() - started)
        self._recorder.step(failed=results is None)
        if results is None:
            return
        self._failures = 0
        now = time.monotonic()
        self._metrics.observe_step(batch, now - started)
        for result in results:
            self._take_result(result, now)

    def _rebalance(self, decided: Rebalance) -> bool:
        """Do what all members have decided on; False when this one has failed at it."""
        assert self._rebalancer is not None
        try:
            if decided is Rebalance.ABANDON:
                self._rebalancer.abandon("it did not end within its deadline")
            elif decided is Rebalance.GO_ON:
                self._rebalancer.advance()
            else:
                self._rebalancer.gather_if_due()
        except Exception as error:
            self._fail([], error)
            return False
        return True

    def _send_pages(self, results: Sequence[StepResult]) -> None:
        """Send what these have brought to the decode workers that want it: full pages, all of them
        with the first token."""
        reads: list[tuple[Request, int, list[int]]] = []
        size = self._engine.limits.block_pages
        for result in results:
            request = result.request
            if request.outgoing is None:
                continue
            full = result.num_computed // self._engine.limits.page_size
            stop = full if result.token is None else len(request.pages)
            for start in range(request.outgoing.num_sent, stop, size):
                reads.append((request, start, request.pages[start : min(stop, start + size)]))
        blocks = self._engine.read_pages([(request.rank, pages) for request, _, pages in reads])
        for (request, _, pages), block in zip(reads, blocks, strict=True):
            assert request.outgoing is not None
            request.outgoing.send(len(pages), block)

    def _fetch(self, fetcher: Fetches) -> None:
        """Take in what has come from prefill workers, ask them for what waiting requests need."""
        arrivals = fetcher.arrivals()
        pages = [a for a in arrivals if isinstance(a, ArrivedPages) and _is_awaited(a)]
        try:
            self._engine.write_pages(
                [(a.request.rank, a.request.pages[a.first :][: a.count], a.block) for a in pages]
            )
        except Exception as error:
            self._fail([], error)
            return
        for arrival in arrivals:
            if not _is_awaited(arrival):
                continue
            if isinstance(arrival, ArrivedToken):
                self._take_first_token(fetcher, arrival)
            elif isinstance(arrival, Lost):
                lost = Output(finish_reason="error", error=arrival.reason, failed_peer=arrival.peer)
                self._finish(self._active[arrival.request.rid], lost)
        for request in self._scheduler.reserve():
            fetcher.fetch(request)

    def _take_first_token(self, fetcher: Fetches, arrival: ArrivedToken) -> None:
        request, now = arrival.request, time.monotonic()
        request.incoming = None
        fetcher.confirm(arrival.incoming)
        if not request.output_ids:
            request.cached_tokens = arrival.cached_tokens
            total = now - self._active[request.rid].submitted
            waited = total - arrival.prefill_seconds - arrival.transfer_seconds
            self._metrics.observe_first_token_parts(
                queue=waited, prefill=arrival.prefill_seconds, transfer=arrival.transfer_seconds
            )
        first = request.params.prompt_logprobs_start
        prompt_logprobs = dict(enumerate(arrival.prompt_logprobs, first))
        result = StepResult(request, request.num_tokens, arrival.token, prompt_logprobs)
        self._take_result(result, now)

    def _take_result(self, result: StepResult, now: float) -> None:
        request = result.request
        self._scheduler.advance(request, result.num_computed)
        active = self._active[request.rid]
        for position, logprob in sorted(result.prompt_logprobs.items()):
            if position == request.next_prompt_logprob:  # a retracted prompt is computed twice
                request.prompt_logprobs.append(logprob)
        if result.token is None:
            return
        if request.outgoing is not None:
            self._hand_over(active, result.token, now)
            return
        if request.phase is not Phase.DECODE:
            request.move_to(Phase.DECODE)
        if request.params.max_new_tokens == 0:
            self._finish(active, _with_prompt(request, Output(finish_reason="length")))
            return
        is_first = not request.output_ids
        if is_first and active.started is not None:
            self._metrics.observe_first_token_parts(
                queue=active.started - active.submitted, prefill=now - active.started
            )
        elif len(request.output_ids) == 1 and self._fetcher is not None:
            assert active.last_token is not None
            self._metrics.observe_first_token_parts(first_decode=now - active.last_token)
        self._metrics.observe_token(now, active.submitted, active.last_token)
        active.last_token = now
        output = self._take_token(active, result.token)
        if is_first:
            output = _with_prompt(request, output)
        if output.finish_reason is None:
            _deliver(request, output)
        else:
            self._finish(active, output)

    def _hand_over(self, active: _Active, token: TokenLogprob, now: float) -> None:
        """The decode worker that has asked for it goes on with the request."""
        request = active.request
        assert request.outgoing is not None and active.started is not None
        queued, prefilled = active.started - active.submitted, now - active.started
        request.outgoing.finish(request, token, queue_seconds=queued, prefill_seconds=prefilled)
        self._metrics.observe_first_token_parts(queue=queued, prefill=prefilled)
        self._metrics.observe_token(now, active.submitted, None)
        self._finish(active, Output(finish_reason="length"))

    def _take_token(self, active: _Active, token: TokenLogprob) -> Output:
        """Add a token to its request and say what it adds to the answer."""
        request, params, text = active.request, active.request.params, active.text
        request.output_ids.append(token.token_id)
        reason: FinishReason | None = None
        matched: str | int | None = None
        piece = ""
        ends = token.token_id in params.stop_token_ids or (
            token.token_id in self._eos_token_ids and not params.ignore_eos
        )
        if ends:
            reason, matched = "stop", token.token_id
        else:
            piece = text.push(token.token_id)
            if text.matched is not None:
                reason, matched = "stop", text.matched
            elif (
                len(request.output_ids) >= params.max_new_tokens
                or request.num_tokens >= self._engine.limits.context_length
            ):
                reason = "length"
        if reason is not None:
            piece += text.finish()
            if text.matched is not None:  # the end of the text can complete a stop string
                reason, matched = "stop", text.matched
        return Output(
            text=piece,
            token_ids=(token.token_id,),
            logprobs=(token,) if params.logprobs else (),
            finish_reason=reason,
            matched_stop=matched,
        )

    def _add(self, requests: list[Request], submitted: float) -> None:
        for request in requests:
            if request.next_prompt_logprob == 0:
                request.prompt_logprobs.append(TokenLogprob(request.prompt_ids[0], None))
            text = self._make_text(request.params.stop)
            self._active[request.rid] = _Active(request, text, submitted)
            self._scheduler.add(request)
            self._metrics.observe_prompt(len(request.prompt_ids))
        with self._lock:
            self._num_arriving -= len(requests)
            self._num_waiting = len(self._scheduler.waiting)

    def _abort(self, rid: str) -> None:
        if active := self._active.get(rid):
            self._finish(active, Output(text=active.text.finish(), finish_reason="abort"))

    def _finish(self, active: _Active, output: Output) -> None:
        """Hand out the last output and let go of the request."""
        request = active.request
        failed = output.finish_reason in ("abort", "error")
        self._scheduler.remove(request, Phase.FAILED if failed else Phase.DONE)
        del self._active[request.rid]
        with self._lock:
            self._rids.discard(request.rid)
        self._publish()
        assert output.finish_reason is not None
        self._metrics.observe_finish(output.finish_reason, time.monotonic() - active.submitted)
        _deliver(request, output)

    def _publish(self) -> None:
        """Let the other threads see where the requests are."""
        with self._lock:
            self._num_waiting = len(self._scheduler.waiting)
        self._metrics.observe_state(self._scheduler)
        self._watcher()

    def _flush(self, num_active: int) -> None:
        """What all members do when one has been asked for it; `num_active` is of all of them."""
        flushes, self._flushes = self._flushes, []
        error = None
        if num_active:
            error = RuntimeError(f"{num_active} requests are being served")
        else:
            self._scheduler.check_integrity()
            self._reset_cache()
        for flush in flushes:
            if error is None:
                flush.set_result(None)
            else:
                flush.set_exception(error)

    def _record(self, what: Record) -> None:
        """What all members do when one has been asked for it."""
        asked = (
            self._records.popleft()[1] if self._records and self._records[0][0] is what else None
        )
        try:
            files = self._recorder.act(what)
        except Exception as error:
            if asked is not None:
                asked.set_exception(error)
            if not isinstance(error, RuntimeError | OSError):
                raise
        else:
            if asked is not None:
                asked.set_result(files)

    def _request_stop(self) -> None:
        self._stop = True

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        """After a failed step: fail its requests, recompute the others, since the cache that was
        donated to the step is gone."""
        logger.exception("a step failed")
        self._failure = error
        self._failures += 1
        message = f"{type(error).__name__}: {error}"
        for request in requests:
            self._finish(self._active[request.rid], Output(finish_reason="error", error=message))
        for running in self._scheduler.running:
            for request in list(running):
                self._scheduler.retract(request)

    def _recover(self) -> None:
        """After a step that failed on any member, on all of them."""
        failure, self._failure = self._failure, None
        if self._failures >= MAX_CONSECUTIVE_FAILURES:
            raise RuntimeError(f"{self._failures} steps in a row failed") from failure
        self._peers.recover()
        if self._rebalancer is not None:
            self._rebalancer.abandon(f"a step failed: {failure or 'on another member'}")
        if failure is not None:
            self._reset_cache()

    def _reset_cache(self) -> None:
        """Lose all latents; no request holds pages."""
        self._scheduler.forget_cached()
        self._engine.reset_cache()

    def _die(self, reason: str) -> None:
        """Nothing more will be served; every request hears of it."""
        with self._lock:
            self.error = reason
            self._accepting = False
            self._rids.clear()
        while not self._commands.empty():
            with contextlib.suppress(Exception):  # it is dead already
                self._commands.get()()
        for active in self._active.values():
            _deliver(active.request, Output(finish_reason="error", error=reason))
        self._active.clear()
        for flush in self._flushes:
            flush.set_exception(RuntimeError(f"the serving loop has stopped: {reason}"))
        for _, done in self._records:
            done.set_exception(RuntimeError(f"the serving loop has stopped: {reason}"))
        with self._lock:
            self._num_waiting = 0
        self._watcher()


def _is_awaited(arrival: Arrival) -> bool:
    """A transfer that is over may still have had things on their way."""
    return arrival.request.incoming is arrival.incoming


def _with_prompt(request: Request, output: Output) -> Output:
    """A request's first output, with what it says of the prompt."""
    return dataclasses.replace(
        output,
        prompt_logprobs=tuple(request.prompt_logprobs),
        cached_tokens=request.cached_tokens or 0,
    )


def _deliver(request: Request, output: Output) -> None:
    """Hand an output to the request's sink; a client that is gone must not stop the others."""
    try:
        request.sink(output)
    except Exception:
        logger.exception("the sink of request %s failed", request.rid)


def _raise(error: Exception) -> None:
    raise error
