#include "ep_group.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <dirent.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <stdexcept>

namespace jaxmoe {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr char kPrefix[] = "jaxmoe-";
constexpr uint64_t kMagic = 0x6a61786d6f650001;
constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;
// A count in the upper part of which stands the epoch, so that what is left from before a failure or
// a change of members never passes for something new.
constexpr int kEpochShift = 40;
constexpr double kTick = 0.1;  // seconds between looks at who is alive
constexpr double kYoung = 20;  // seconds a group may take to be made before it is held abandoned

int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

int64_t Nanoseconds(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

std::string ErrorText(const std::string& what) { return what + ": " + std::strerror(errno); }

// Sleeps while `word` is `seen`, at most so long.
void WaitOn(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
#ifdef __linux__
  timespec time;
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_nsec = static_cast<long>((seconds - static_cast<double>(time.tv_sec)) * 1e9);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0);
#else
  // No futex: look again soon.
  if (word.load() == seen) {
    std::this_thread::sleep_for(Seconds(std::min(seconds, 2e-4)));
  }
#endif
}

void WakeAllOn(std::atomic<uint32_t>& word) {
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

#ifdef __linux__
// A member holds the lock of its byte as long as it lives: the kernel lets go of it however the
// process ends, and no number of a process is ever mistaken for another's.
flock LockOf(int64_t first, int64_t count) {
  flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = first;
  lock.l_len = count;
  return lock;
}

bool IsLocked(int fd, int64_t first, int64_t count) {
  flock lock = LockOf(first, count);
  return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}
#endif

}  // namespace

struct EpGroup::Header {
  std::atomic<uint64_t> magic;  // written last
  int64_t num_members;
  char description[2048];
  std::atomic<uint32_t> failure_state;  // 0 none, 1 being written, 2 there
  std::atomic<uint64_t> failure_epoch;
  char failure[512];
  std::atomic<uint64_t> epoch;  // of the newest table, 0 before the first change
  uint64_t agreed[2];           // how often members have agreed when the epoch began, by epoch % 2
};

struct alignas(kLine) EpGroup::MemberSlot {
  std::atomic<uint32_t> joined;  // 1 here, 2 left
  std::atomic<int64_t> pid;
  std::atomic<int64_t> first_rank, num_ranks;
  alignas(kLine) std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> num_sleeping;
  alignas(kLine) std::atomic<uint64_t> proposed;
  struct {
    int64_t size;
    int64_t values[kMaxProposal];
  } proposals[2];
  char wish[512];  // what it asked for in `SetActive`, or why that cannot be
};

struct alignas(kLine) EpGroup::ChannelSlot {
  std::atomic<uint64_t> announced;
  std::atomic<int64_t> delivered_at;  // nanoseconds of the monotonic clock, the host's
  alignas(kLine) std::atomic<uint64_t> taken;
};

struct EpGroup::Pending {
  Operation operation;
  std::function<int64_t()> sent_bytes;  // of a start
  bool is_start;
  uint64_t count;  // with the epoch
  int64_t submitted_at;  // nanoseconds
  Clock::time_point deadline;
  bool has_waited = false;
};

// A thread that does what it is given, in order.
class EpGroup::Worker {
 public:
  Worker() : thread_([this] { Run(); }) {}

  ~Worker() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  void Do(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      works_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || !works_.empty(); });
      if (works_.empty()) return;
      auto work = std::move(works_.front());
      works_.pop_front();
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> works_;
  bool stop_ = false;
  std::thread thread_;
};

int64_t EpGroup::SharedBytes(int64_t num_members, int64_t max_ranks, int64_t num_channels,
                             int64_t window_bytes) {
  return RoundUp(RoundUp(sizeof(Header), kLine) + num_members * sizeof(MemberSlot) +
                     num_channels * max_ranks * sizeof(ChannelSlot) +
                     2 * RoundUp(max_ranks, kLine),
                 kPage) +
         num_channels * max_ranks * RoundUp(window_bytes, kPage);
}

EpGroup::MemberSlot& EpGroup::Slot(int64_t member) const {
  return reinterpret_cast<MemberSlot*>(memory_ + RoundUp(sizeof(Header), kLine))[member];
}

EpGroup::ChannelSlot& EpGroup::At(int64_t channel, int64_t rank) const {
  return reinterpret_cast<ChannelSlot*>(
      &Slot(options_.num_members))[channel * options_.max_ranks + rank];
}

// Which ranks are active in an epoch; the table before it stays as it is meanwhile.
std::atomic<uint8_t>* EpGroup::Table(uint64_t epoch) const {
  auto* first = reinterpret_cast<std::atomic<uint8_t>*>(&At(options_.num_channels, 0));
  return first + static_cast<int64_t>(epoch % 2) * RoundUp(options_.max_ranks, kLine);
}

char* EpGroup::Window(int64_t channel, int64_t rank) const {
  const int64_t window = RoundUp(options_.window_bytes, kPage);
  const int64_t first = SharedBytes(options_.num_members, options_.max_ranks,
                                    options_.num_channels, 0);
  return memory_ + first + (channel * options_.max_ranks + rank) * window;
}

EpGroup::EpGroup(const EpGroupOptions& options)
    : options_(options),
      memory_bytes_(SharedBytes(options.num_members, options.max_ranks, options.num_channels,
                                options.window_bytes)),
      active_(options.max_ranks),
      started_(options.num_channels * options.max_ranks),
      finished_(options.num_channels * options.max_ranks),
      started_at_(options.num_channels * options.max_ranks),
      link_free_at_(options.max_ranks) {
  const int64_t num_ranks = static_cast<int64_t>(options.devices.size());
  if (options.first_rank < 0 || options.first_rank + num_ranks > options.max_ranks) {
    throw std::runtime_error("ranks " + std::to_string(options.first_rank) + " to " +
                             std::to_string(options.first_rank + num_ranks - 1) +
                             " do not lie in a group of at most " +
                             std::to_string(options.max_ranks));
  }
  for (int64_t i = 0; i < num_ranks; ++i) {
    rank_of_device_[options.devices[i]] = options.first_rank + i;
  }
  try {
    Map();
    Join();
  } catch (...) {
    Leave();
    throw;
  }
  for (int64_t i = 0; i < num_ranks; ++i) workers_.push_back(std::make_unique<Worker>());
  progress_thread_ = std::thread([this] { RunProgressThread(); });
}

EpGroup::~EpGroup() {
  stop_ = true;
  Ring(options_.member);
  progress_thread_.join();
  std::list<std::shared_ptr<Pending>> left;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    left.swap(pending_);
  }
  for (const auto& pending : left) {
    HandOver(pending->operation.rank, [pending] {
      pending->operation.done("the expert-parallel group was left while an exchange was under way");
    });
  }
  workers_.clear();
  Leave();
}

void EpGroup::Map() {
  if (options_.num_members == 1) {
    memory_ = static_cast<char*>(mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory_ == MAP_FAILED) {
      memory_ = nullptr;
      throw std::runtime_error(
          ErrorText("cannot allocate " + std::to_string(memory_bytes_) + " bytes"));
    }
    return;
  }
#ifdef __linux__
  RemoveAbandoned();
  const std::string name = "/" + (kPrefix + options_.name);
  const auto deadline = Clock::now() + Seconds(options_.join_timeout);
  const int64_t header_bytes = SharedBytes(options_.num_members, options_.max_ranks,
                                           options_.num_channels, 0);
  if (options_.member == 0) {
    fd_ = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd_ < 0) throw std::runtime_error(ErrorText("cannot make shared memory " + name));
    flock lock = LockOf(0, 1);
    if (fcntl(fd_, F_OFD_SETLK, &lock) != 0 || ftruncate(fd_, memory_bytes_) != 0) {
      throw std::runtime_error(ErrorText("cannot use shared memory " + name));
    }
  }
  while (fd_ < 0) {
    const int fd = shm_open(name.c_str(), O_RDWR, 0600);
    struct stat status;
    if (fd >= 0 && fstat(fd, &status) == 0 && status.st_size > 0 && IsLocked(fd, 0, 1)) {
      if (status.st_size != memory_bytes_) {
        close(fd);
        throw std::runtime_error("shared memory " + name + " has " +
                                 std::to_string(status.st_size) + " bytes, this member expects " +
                                 std::to_string(memory_bytes_) +
                                 ": the members' settings differ");
      }
      flock lock = LockOf(options_.member, 1);
      if (fcntl(fd, F_OFD_SETLK, &lock) != 0) {
        close(fd);
        throw std::runtime_error("member " + std::to_string(options_.member) + " of " + name +
                                 " is there already");
      }
      fd_ = fd;
      break;
    }
    if (fd >= 0) close(fd);
    if (Clock::now() > deadline) {
      throw std::runtime_error("member 0 has not made shared memory " + name + " within " +
                               std::to_string(static_cast<int64_t>(options_.join_timeout)) +
                               " seconds");
    }
    std::this_thread::sleep_for(Seconds(0.02));
  }
  // What a member will use is reserved now: running out of it later would kill the process.
  auto reserve = [&](int64_t start, int64_t size) {
    if (size == 0) return;
    const int error = posix_fallocate(fd_, start, size);
    if (error != 0) {
      errno = error;
      throw std::runtime_error(ErrorText("shared memory has no room for the " +
                                         std::to_string(size) + " bytes of a rank's windows (" +
                                         std::to_string(memory_bytes_) + " in all)"));
    }
  };
  if (options_.member == 0) reserve(0, header_bytes);
  const int64_t window = RoundUp(options_.window_bytes, kPage);
  for (int64_t channel = 0; channel < options_.num_channels; ++channel) {
    reserve(header_bytes + (channel * options_.max_ranks + options_.first_rank) * window,
            static_cast<int64_t>(options_.devices.size()) * window);
  }
  void* memory = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) throw std::runtime_error(ErrorText("cannot map " + name));
  memory_ = static_cast<char*>(memory);
#else
  throw std::runtime_error("a group of several processes needs Linux");
#endif
}

void EpGroup::Join() {
  Header& header = *reinterpret_cast<Header*>(memory_);
  const auto deadline = Clock::now() + Seconds(options_.join_timeout);
  if (options_.member == 0) {
    header.num_members = options_.num_members;
    std::strncpy(header.description, options_.description.c_str(),
                 sizeof(header.description) - 1);
    header.magic.store(kMagic, std::memory_order_release);
  }
  while (header.magic.load(std::memory_order_acquire) != kMagic) {
    if (Clock::now() > deadline) throw std::runtime_error("member 0 has not set up the group");
    std::this_thread::sleep_for(Seconds(0.01));
  }
  const std::string mine = options_.description.substr(0, sizeof(header.description) - 1);
  if (header.num_members != options_.num_members || mine != header.description) {
    throw std::runtime_error("the members' settings differ: member 0 has " +
                             std::string(header.description) + ", member " +
                             std::to_string(options_.member) + " has " + mine);
  }
  MemberSlot& slot = Slot(options_.member);
  slot.pid = getpid();
  slot.first_rank = options_.first_rank;
  slot.num_ranks = static_cast<int64_t>(options_.devices.size());
  slot.joined.store(1);
  for (int64_t member = 0; member < options_.num_members; ++member) {
    while (Slot(member).joined.load() == 0) {
      if (Clock::now() > deadline) {
        throw std::runtime_error("member " + std::to_string(member) + " has not come within " +
                                 std::to_string(static_cast<int64_t>(options_.join_timeout)) +
                                 " seconds");
      }
      std::this_thread::sleep_for(Seconds(0.01));
    }
  }
  for (int64_t member = 0; member < options_.num_members; ++member) {
    const int64_t first = Slot(member).first_rank, count = Slot(member).num_ranks;
    for (int64_t rank = first; rank < first + count; ++rank) {
      if (active_[rank]) {
        throw std::runtime_error("rank " + std::to_string(rank) + " belongs to two members");
      }
      active_[rank] = 1;
    }
  }
}

void EpGroup::Leave() {
#ifdef __linux__
  if (fd_ >= 0) {
    if (memory_ != nullptr) Slot(options_.member).joined.store(2);
    // First the lock, so that of two that leave at a time one sees that it is the last.
    flock lock = LockOf(options_.member, 1);
    lock.l_type = F_UNLCK;
    fcntl(fd_, F_OFD_SETLK, &lock);
    if (!IsLocked(fd_, 0, 0)) shm_unlink(("/" + (kPrefix + options_.name)).c_str());
  }
#endif
  if (memory_ != nullptr) {
    for (int64_t m = 0; m < options_.num_members; ++m) {
      if (m != options_.member) Ring(m);
    }
    munmap(memory_, memory_bytes_);
  }
  if (fd_ >= 0) close(fd_);
  memory_ = nullptr;
  fd_ = -1;
}

void EpGroup::RemoveAbandoned() {
#ifdef __linux__
  DIR* directory = opendir("/dev/shm");
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    if (std::strncmp(entry->d_name, kPrefix, sizeof(kPrefix) - 1) != 0) continue;
    const std::string name = std::string("/") + entry->d_name;
    const int fd = shm_open(name.c_str(), O_RDWR, 0600);
    if (fd < 0) continue;  // another user's
    struct stat status;
    uint64_t magic = 0;
    const bool is_made = pread(fd, &magic, sizeof(magic), 0) == sizeof(magic) && magic == kMagic;
    if (fstat(fd, &status) == 0 && !IsLocked(fd, 0, 0) &&
        (is_made || std::difftime(time(nullptr), status.st_ctime) > kYoung)) {
      shm_unlink(name.c_str());
    }
    close(fd);
  }
  closedir(directory);
#endif
}

bool EpGroup::IsAlive(int64_t member) const {
  if (member == options_.member) return true;
#ifdef __linux__
  return Slot(member).joined.load() != 2 && IsLocked(fd_, member, 1);
#else
  return true;
#endif
}

int64_t EpGroup::MemberOf(int64_t rank) const {
  for (int64_t member = 0; member < options_.num_members; ++member) {
    const int64_t first = Slot(member).first_rank;
    if (first <= rank && rank < first + Slot(member).num_ranks) return member;
  }
  return -1;
}

std::string EpGroup::Describe(int64_t rank) const {
  const int64_t member = MemberOf(rank);
  std::string text = "rank " + std::to_string(rank);
  if (options_.num_members > 1 && member >= 0) {
    text += " (member " + std::to_string(member) + ", process " +
            std::to_string(Slot(member).pid.load()) + ")";
  }
  return text;
}

std::string EpGroup::Failure() const {
  const Header& header = *reinterpret_cast<const Header*>(memory_);
  if (header.failure_state.load(std::memory_order_acquire) != 2 ||
      header.failure_epoch.load(std::memory_order_acquire) < epoch_) {
    return "";
  }
  return header.failure;
}

void EpGroup::Fail(const std::string& message) {
  Header& header = *reinterpret_cast<Header*>(memory_);
  uint32_t none = 0;
  if (header.failure_state.compare_exchange_strong(none, 1)) {
    std::strncpy(header.failure, message.c_str(), sizeof(header.failure) - 1);
    header.failure_epoch.store(epoch_);
    header.failure_state.store(2, std::memory_order_release);
  }
  for (int64_t member = 0; member < options_.num_members; ++member) Ring(member);
}

std::string EpGroup::WhyGone(int64_t member) const {
  const MemberSlot& slot = Slot(member);
  const int64_t first = slot.first_rank, last = first + slot.num_ranks - 1;
  return "member " + std::to_string(member) + " (process " + std::to_string(slot.pid.load()) +
         ", rank" + (first == last ? " " : "s " + std::to_string(first) + " to ") +
         std::to_string(last) + ") " + (slot.joined.load() == 2 ? "has left" : "has died");
}

void EpGroup::RequireOthersAlive() {
  for (const int64_t member : ActiveMembers()) {
    if (IsAlive(member)) continue;
    const std::string message = WhyGone(member);
    Fail(message);
    throw std::runtime_error(message);
  }
}

bool EpGroup::IsActiveMember(int64_t member) const {
  const int64_t first = Slot(member).first_rank, count = Slot(member).num_ranks;
  return std::any_of(&active_[first], &active_[first] + count, [](const auto& is) { return is != 0; });
}

std::vector<int64_t> EpGroup::ActiveMembers() const {
  std::vector<int64_t> members;
  for (int64_t member = 0; member < options_.num_members; ++member) {
    if (IsActiveMember(member)) members.push_back(member);
  }
  return members;
}

void EpGroup::RequireActiveMember() const {
  if (!IsActiveMember(options_.member)) {
    throw std::runtime_error("member " + std::to_string(options_.member) +
                             " has no active rank: it takes part in nothing until it has one");
  }
}

void EpGroup::Ring(int64_t member) {
  MemberSlot& slot = Slot(member);
  slot.doorbell.fetch_add(1);
  if (slot.num_sleeping.load() > 0) WakeAllOn(slot.doorbell);
}

void EpGroup::RingOthers() {
  if (options_.num_members == 1) return;
  for (int64_t member = 0; member < options_.num_members; ++member) {
    if (member != options_.member) Ring(member);
  }
}

void EpGroup::Sleep(uint32_t seen, double seconds) {
  MemberSlot& slot = Slot(options_.member);
  slot.num_sleeping.fetch_add(1);
  WaitOn(slot.doorbell, seen, seconds);
  slot.num_sleeping.fetch_sub(1);
}

std::vector<std::vector<int64_t>> EpGroup::Agree(const std::vector<int64_t>& values,
                                                 double timeout) {
  if (values.size() > kMaxProposal) {
    throw std::runtime_error("a proposal has at most " + std::to_string(kMaxProposal) +
                             " numbers, got " + std::to_string(values.size()));
  }
  RequireActiveMember();
  MemberSlot& own = Slot(options_.member);
  const uint64_t count = ++agreed_;
  auto& proposal = own.proposals[count % 2];
  proposal.size = static_cast<int64_t>(values.size());
  std::copy(values.begin(), values.end(), proposal.values);
  own.proposed.store(count, std::memory_order_release);
  RingOthers();

  const auto begun = Clock::now();
  auto looked = begun;
  std::vector<std::vector<int64_t>> all;
  for (const int64_t member : ActiveMembers()) {
    const MemberSlot& slot = Slot(member);
    while (true) {
      const uint32_t seen = own.doorbell.load();
      if (slot.proposed.load(std::memory_order_acquire) >= count) break;
      const auto now = Clock::now();
      if (now - looked > Seconds(kTick)) {
        RequireOthersAlive();
        looked = now;
        if (timeout >= 0 && now - begun > Seconds(timeout)) {
          throw std::runtime_error("member " + std::to_string(member) + " (process " +
                                   std::to_string(slot.pid.load()) +
                                   ") has not come to the next step within " +
                                   std::to_string(timeout) + " seconds");
        }
      }
      Sleep(seen, kTick);
    }
    const auto& theirs = slot.proposals[count % 2];
    all.emplace_back(theirs.values, theirs.values + theirs.size);
  }
  return all;
}

void EpGroup::Wait() {
  RequireActiveMember();
  MemberSlot& own = Slot(options_.member);
  while (true) {
    const uint32_t seen = own.doorbell.load();
    const uint64_t wakes = wakes_.load();
    if (wakes != seen_wakes_) {
      seen_wakes_ = wakes;
      return;
    }
    for (const int64_t member : ActiveMembers()) {
      if (Slot(member).proposed.load() > agreed_) return;
    }
    RequireOthersAlive();
    Sleep(seen, kTick);
  }
}

void EpGroup::Wake() {
  wakes_.fetch_add(1);
  Ring(options_.member);
}

std::string EpGroup::WhyNotActive(const std::vector<int64_t>& ranks) const {
  if (const std::string failure = Failure(); !failure.empty()) {
    return "the active ranks cannot change until all have recovered: " + failure;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < started_.size(); ++i) {
      if (started_[i] == finished_[i] && pending_.empty()) continue;
      return "the active ranks cannot change while an exchange is under way";
    }
  }
  if (ranks.empty()) return "there must be an active rank";
  for (const int64_t rank : ranks) {
    const int64_t member = MemberOf(rank);
    const std::string cannot = "rank " + std::to_string(rank) + " cannot be active: ";
    if (member < 0) return cannot + "no member has it";
    if (!IsAlive(member)) return cannot + WhyGone(member);
  }
  return "";
}

void EpGroup::SetActive(const std::vector<int64_t>& ranks) {
  RequireActiveMember();
  const std::string refusal = WhyNotActive(ranks);
  std::string wish = "ranks";
  for (const int64_t rank : ranks) wish += " " + std::to_string(rank);
  MemberSlot& own = Slot(options_.member);
  std::strncpy(own.wish, (refusal.empty() ? wish : refusal).c_str(), sizeof(own.wish) - 1);
  // A wish may be longer than there is room for.
  const auto hash = static_cast<int64_t>(std::hash<std::string>()(wish));
  const auto wishes = Agree({refusal.empty(), hash}, options_.timeout);

  const std::vector<int64_t> members = ActiveMembers();
  std::string error;
  for (size_t i = 0; i < members.size() && error.empty(); ++i) {
    const std::string name = "member " + std::to_string(members[i]);
    if (wishes[i][0] == 0) {
      error = (options_.num_members > 1 ? name + ": " : "") + Slot(members[i]).wish;
    } else if (wishes[i][1] != wishes[0][1]) {
      error = "the members disagree on who is active: member " + std::to_string(members[0]) +
              " asks for " + Slot(members[0]).wish + ", " + name + " for " + Slot(members[i]).wish;
    }
  }
  Agree({}, options_.timeout);  // Everybody has read the wishes, and nobody is in a step.
  if (!error.empty()) throw std::runtime_error(error);
  std::vector<uint8_t> active(options_.max_ranks, 0);
  for (const int64_t rank : ranks) active[rank] = 1;
  Advance(active);
}

// Begins a new epoch, on all members that have had an active rank. One of them tells the others: one
// that stays, if any does, because the next change waits for it. One that leaves could tell of this
// change after those that stay have told of the next.
void EpGroup::Advance(const std::vector<uint8_t>& active) {
  const std::vector<int64_t> before = ActiveMembers();
  const uint64_t epoch = epoch_ + 1;
  Apply(active, epoch);
  const auto stays = std::find_if(before.begin(), before.end(),
                                  [this](int64_t member) { return IsActiveMember(member); });
  const int64_t teller = stays == before.end() ? before.front() : *stays;
  if (teller != options_.member) return;
  Header& header = *reinterpret_cast<Header*>(memory_);
  std::copy(active.begin(), active.end(), Table(epoch));
  header.agreed[epoch % 2] = agreed_;
  header.epoch.store(epoch, std::memory_order_release);
  RingOthers();
}

void EpGroup::Apply(const std::vector<uint8_t>& active, uint64_t epoch) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::copy(active.begin(), active.end(), active_.begin());
  epoch_ = epoch;
  for (auto& count : started_) count = 0;
  for (auto& count : finished_) count = 0;
}

bool EpGroup::WaitActive(double timeout) {
  Header& header = *reinterpret_cast<Header*>(memory_);
  MemberSlot& own = Slot(options_.member);
  const auto begun = Clock::now();
  while (!IsActiveMember(options_.member)) {
    const uint32_t seen = own.doorbell.load();
    const uint64_t epoch = header.epoch.load(std::memory_order_acquire);
    if (epoch > epoch_) {
      const std::vector<uint8_t> active(Table(epoch), Table(epoch) + options_.max_ranks);
      const uint64_t agreed = header.agreed[epoch % 2];
      std::atomic_thread_fence(std::memory_order_acquire);
      // Otherwise this table may have been written over. One in which this member has an active rank
      // never is: the others cannot agree on the next one without it.
      if (header.epoch.load() == epoch) {
        agreed_ = agreed;
        Apply(active, epoch);
      }
      continue;
    }
    const std::vector<int64_t> members = ActiveMembers();
    if (std::none_of(members.begin(), members.end(), [this](int64_t m) { return IsAlive(m); })) {
      const std::string failure = Failure();
      throw std::runtime_error("no active member is left: " +
                               (failure.empty() ? WhyGone(members.front()) : failure));
    }
    double seconds = kTick;
    if (timeout >= 0) {
      const double left = timeout - Seconds(Clock::now() - begun).count();
      if (left <= 0) return false;
      seconds = std::min(seconds, left);
    }
    Sleep(seen, seconds);
  }
  return true;
}

std::vector<int64_t> EpGroup::Active() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank < options_.max_ranks; ++rank) {
    if (active_[rank]) ranks.push_back(rank);
  }
  return ranks;
}

void EpGroup::Recover() {
  RequireOthersAlive();
  Agree({}, options_.timeout);  // Nobody is in a step any more.
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pending_.empty()) throw std::runtime_error("an exchange is still under way");
  }
  Advance({active_.begin(), active_.end()});
  Header& header = *reinterpret_cast<Header*>(memory_);
  if (ActiveMembers().front() == options_.member) header.failure_state.store(0);
  Agree({}, options_.timeout);  // Nobody is in the old epoch any more.
}

int64_t EpGroup::RankOf(int64_t device) const {
  const auto found = rank_of_device_.find(device);
  return found == rank_of_device_.end() ? -1 : found->second;
}

void EpGroup::Start(Operation operation, std::function<int64_t()> sent_bytes) {
  auto pending = std::make_shared<Pending>();
  auto& count = started_[operation.channel * options_.max_ranks + operation.rank];
  pending->count = (epoch_ << kEpochShift) + count.fetch_add(1) + 1;
  pending->operation = std::move(operation);
  pending->sent_bytes = std::move(sent_bytes);
  pending->is_start = true;
  Submit(std::move(pending));
}

void EpGroup::Finish(Operation operation) {
  auto pending = std::make_shared<Pending>();
  auto& count = finished_[operation.channel * options_.max_ranks + operation.rank];
  pending->count = (epoch_ << kEpochShift) + count.fetch_add(1) + 1;
  pending->operation = std::move(operation);
  pending->is_start = false;
  Submit(std::move(pending));
}

void EpGroup::Submit(std::shared_ptr<Pending> pending) {
  Operation& operation = pending->operation;
  if (!active_[operation.rank]) {
    std::string error = operation.run();
    if (!error.empty()) error = Describe(operation.rank) + ": " + error;
    operation.done(error);
    return;
  }
  (pending->is_start ? counters.starts : counters.finishes)
      .fetch_add(1, std::memory_order_relaxed);
  pending->submitted_at = Nanoseconds(Clock::now());
  pending->deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(options_.timeout));
  if (const std::string failure = Failure(); !failure.empty()) {
    operation.done(failure);
    return;
  }
  auto when = Clock::time_point::max();
  if (IsReady(*pending, Clock::now(), &when)) {
    Execute(*pending);
    return;
  }
  pending->has_waited = true;
  if (!pending->is_start) counters.waited.fetch_add(1, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.push_back(std::move(pending));
  }
  // What it waits for may have come in between.
  if (Progress() != Clock::time_point::max()) Ring(options_.member);
}

bool EpGroup::IsReady(const Pending& pending, Clock::time_point now,
                      Clock::time_point* when) const {
  const int64_t channel = pending.operation.channel;
  const bool is_first = (pending.count & ((uint64_t{1} << kEpochShift) - 1)) == 1;
  if (pending.is_start && is_first) return true;
  for (int64_t rank = 0; rank < options_.max_ranks; ++rank) {
    if (!active_[rank]) continue;
    const ChannelSlot& slot = At(channel, rank);
    if (pending.is_start) {
      if (slot.taken.load(std::memory_order_acquire) < pending.count - 1) return false;
    } else if (slot.announced.load(std::memory_order_acquire) < pending.count) {
      return false;
    }
  }
  if (pending.is_start) return true;
  const Clock::time_point delivered{std::chrono::duration_cast<Clock::duration>(
      std::chrono::nanoseconds(DeliveredAt(channel, pending.operation.rank)))};
  if (delivered <= now) return true;
  *when = std::min(*when, delivered);
  return false;
}

int64_t EpGroup::DeliveredAt(int64_t channel, int64_t rank) const {
  int64_t delivered_at = 0;
  for (int64_t from = 0; from < options_.max_ranks; ++from) {
    if (!active_[from] || from == rank) continue;  // its own crosses no link
    delivered_at = std::max(delivered_at,
                            At(channel, from).delivered_at.load(std::memory_order_relaxed));
  }
  return delivered_at;
}

void EpGroup::Execute(Pending& pending) {
  Operation& operation = pending.operation;
  auto& started_at = started_at_[operation.channel * options_.max_ranks + operation.rank];
  if (!pending.is_start) {  // before it is taken, when others may send again
    const int64_t delivered_at = DeliveredAt(operation.channel, operation.rank);
    counters.under_way += std::max<int64_t>(0, delivered_at - started_at);
    counters.awaited +=
        std::max<int64_t>(0, delivered_at - std::max(pending.submitted_at, started_at.load()));
  }
  if (std::string error = operation.run(); !error.empty()) {
    error = Describe(operation.rank) + ": " + error;
    Fail(error);
    Progress();
    operation.done(error);
    return;
  }
  ChannelSlot& slot = At(operation.channel, operation.rank);
  if (pending.is_start) {
    const int64_t now = Nanoseconds(Clock::now());
    int64_t delivered_at = now;
    if (options_.bandwidth > 0 || options_.latency > 0) {
      const double seconds =
          options_.bandwidth > 0
              ? static_cast<double>(pending.sent_bytes()) / options_.bandwidth
              : 0.0;
      // What a rank sends leaves it one after the other.
      auto& free_at = link_free_at_[operation.rank];
      const int64_t left = std::max(now, free_at.load()) + static_cast<int64_t>(seconds * 1e9);
      free_at.store(left);
      delivered_at = left + static_cast<int64_t>(options_.latency * 1e9);
    }
    started_at.store(now);
    slot.delivered_at.store(delivered_at, std::memory_order_relaxed);
    slot.announced.store(pending.count, std::memory_order_release);
  } else {
    slot.taken.store(pending.count, std::memory_order_release);
  }
  RingOthers();
  if (Progress() != Clock::time_point::max()) Ring(options_.member);
  operation.done("");
}

EpGroup::Clock::time_point EpGroup::Progress() {
  auto when = Clock::time_point::max();
  while (true) {
    std::shared_ptr<Pending> ready;
    const auto now = Clock::now();
    const std::string failure = Failure();
    when = Clock::time_point::max();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto it = pending_.begin(); it != pending_.end(); ++it) {
        if (!failure.empty() || IsReady(**it, now, &when)) {
          ready = *it;
          pending_.erase(it);
          break;
        }
      }
    }
    if (ready == nullptr) return when;
    HandOver(ready->operation.rank, [this, ready, failure] {
      if (failure.empty()) {
        Execute(*ready);
      } else {
        ready->operation.done(failure);
      }
    });
  }
}

void EpGroup::HandOver(int64_t rank, std::function<void()> work) {
  workers_[rank - options_.first_rank]->Do(std::move(work));
}

void EpGroup::CheckWaiting() {
  const auto now = Clock::now();
  std::string message;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& pending : pending_) {
      if (now < pending->deadline) continue;
      for (int64_t rank = 0; rank < options_.max_ranks && message.empty(); ++rank) {
        if (!active_[rank]) continue;
        const ChannelSlot& slot = At(pending->operation.channel, rank);
        const bool is_missing = pending->is_start
                                    ? slot.taken.load() < pending->count - 1
                                    : slot.announced.load() < pending->count;
        if (!is_missing) continue;
        message = Describe(pending->operation.rank) + " has waited " +
                  std::to_string(options_.timeout) + " seconds for " + Describe(rank);
      }
    }
    if (pending_.empty()) return;
  }
  if (!message.empty()) {
    Fail(message);
    return;
  }
  try {
    RequireOthersAlive();
  } catch (const std::runtime_error&) {
    // Everything under way has been failed.
  }
}

void EpGroup::RunProgressThread() {
  MemberSlot& own = Slot(options_.member);
  auto looked = Clock::now();
  while (!stop_) {
    const uint32_t seen = own.doorbell.load();
    const auto when = Progress();
    const auto now = Clock::now();
    if (now - looked > Seconds(kTick)) {
      CheckWaiting();
      looked = now;
    }
    double seconds = kTick;
    if (when != Clock::time_point::max()) {
      seconds = std::min(seconds, std::chrono::duration_cast<Seconds>(when - now).count());
    }
    if (seconds > 0) Sleep(seen, seconds);
  }
}

namespace {

std::mutex current_mutex;
std::shared_ptr<EpGroup> current;

}  // namespace

std::shared_ptr<EpGroup> CurrentEpGroup() {
  std::lock_guard<std::mutex> lock(current_mutex);
  return current;
}

void SetCurrentEpGroup(std::shared_ptr<EpGroup> group) {
  std::lock_guard<std::mutex> lock(current_mutex);
  std::swap(current, group);
}

}  // namespace jaxmoe
