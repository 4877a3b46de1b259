// An expert-parallel group on one host: who its ranks are, and how they wait for each other.
//
// A member is a process; it drives consecutive ranks, one for each of its devices. Members share one
// piece of memory: a POSIX shared-memory object, or plain memory when there is one member only.
//
// Ranks exchange data on channels. On each channel every active rank does the same, over and over:
// it starts (writes what it sends, then announces it) and it finishes (waits until all active ranks
// have announced theirs, then takes what is for it). A start waits until all active ranks have taken
// what the start before it brought, so nothing is overwritten. Neither blocks a thread of XLA's:
// what cannot run yet is kept until what it waits for has come, and then runs on a thread of its
// rank, since what XLA does next there may block, in a collective of its own for instance.
//
// Which ranks are active changes between steps, by agreement of the members that have active ranks; a
// table in the shared memory tells the others. A program of a rank that is not active runs as if
// there were nobody: it sends nothing, gets nothing, and nobody waits.
//
// A failure (a member that dies, a rank that does not come in time, an exchange that makes no sense)
// ends what is under way on all members with the same words, and everything after it, until all
// members `Recover`.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace jaxmoe {

struct EpGroupOptions {
  std::string name;         // of the shared memory; empty for a group of one member
  std::string description;  // must be the same on all members
  int64_t num_members = 1;
  int64_t member = 0;
  int64_t max_ranks = 1;
  int64_t first_rank = 0;
  std::vector<int64_t> devices;  // the ordinals of this member's devices, in order of rank
  int64_t num_channels = 1;
  int64_t window_bytes = 0;  // of a rank on a channel
  double timeout = 30;       // seconds a rank may keep the others waiting in an exchange
  double join_timeout = 60;  // seconds members may take to come
  double latency = 0;        // seconds: of the modelled link
  double bandwidth = 0;      // bytes a second; 0 is no model
};

class EpGroup {
 public:
  static constexpr int64_t kMaxProposal = 1024;

  // Joins the group, or makes it; returns when all members have come. Throws std::runtime_error.
  explicit EpGroup(const EpGroupOptions& options);
  ~EpGroup();
  EpGroup(const EpGroup&) = delete;
  EpGroup& operator=(const EpGroup&) = delete;

  static int64_t SharedBytes(int64_t num_members, int64_t max_ranks, int64_t num_channels,
                             int64_t window_bytes);

  const EpGroupOptions& options() const { return options_; }

  // --- Between steps, by one thread of each member. They throw std::runtime_error.

  // The values of every member that has an active rank, by member; only these may call it, and
  // `Wait`, `SetActive` and `Recover`. A member may wait `timeout` seconds for the others; below 0,
  // any time, as long as they live.
  std::vector<std::vector<int64_t>> Agree(const std::vector<int64_t>& values, double timeout);
  // Returns when `Wake` has been called since the last time, or a peer waits in `Agree`.
  void Wait();
  void Wake();
  // Lets these ranks take part from the next exchange on; the same on all members that have an active
  // rank, with nothing under way. Either changes it on all of them or throws on all of them.
  void SetActive(const std::vector<int64_t>& ranks);
  // Returns true as soon as this member has an active rank, false when that takes longer than
  // `timeout` seconds; below 0, any time, as long as a member that has one lives.
  bool WaitActive(double timeout);
  // All members together, after a failure.
  void Recover();
  std::vector<int64_t> Active() const;
  std::string Failure() const;

  // --- In a step.

  // The rank of the device with this ordinal, or -1.
  int64_t RankOf(int64_t device) const;
  bool IsActive(int64_t rank) const { return active_[rank]; }
  // Whether what one of them sends reaches the other.
  bool AreConnected(int64_t rank, int64_t other) const { return active_[rank] && active_[other]; }
  char* Window(int64_t channel, int64_t rank) const;

  struct Operation {
    int64_t channel;
    int64_t rank;
    // Does the work, as soon as it may be done; returns what is wrong.
    std::function<std::string()> run;
    // Is called once with an empty string, or with what went wrong.
    std::function<void(const std::string&)> done;
  };
  // `sent_bytes` is asked for after `run`: what crosses the link.
  void Start(Operation operation, std::function<int64_t()> sent_bytes);
  void Finish(Operation operation);

  // Since the start, by this member's ranks.
  struct Counters {
    std::atomic<int64_t> starts{0};
    std::atomic<int64_t> finishes{0};
    std::atomic<int64_t> waited{0};  // finishes that found something missing
    std::atomic<int64_t> remote_rows{0};
    std::atomic<int64_t> remote_bytes{0};
    std::atomic<int64_t> local_rows{0};
    // Nanoseconds from a rank's start until all that it is sent has come, and those of them that its
    // finish had to wait.
    std::atomic<int64_t> under_way{0};
    std::atomic<int64_t> awaited{0};
  };
  Counters counters;

 private:
  struct Header;
  struct MemberSlot;
  struct ChannelSlot;
  struct Pending;
  class Worker;
  using Clock = std::chrono::steady_clock;

  void Map();
  void Join();
  void Leave();
  static void RemoveAbandoned();
  bool IsAlive(int64_t member) const;
  std::string WhyGone(int64_t member) const;
  void RequireOthersAlive();
  // Those that have an active rank.
  bool IsActiveMember(int64_t member) const;
  std::vector<int64_t> ActiveMembers() const;
  void RequireActiveMember() const;
  std::atomic<uint8_t>* Table(uint64_t epoch) const;
  std::string WhyNotActive(const std::vector<int64_t>& ranks) const;
  void Advance(const std::vector<uint8_t>& active);
  void Apply(const std::vector<uint8_t>& active, uint64_t epoch);
  void Fail(const std::string& message);
  MemberSlot& Slot(int64_t member) const;
  ChannelSlot& At(int64_t channel, int64_t rank) const;
  int64_t MemberOf(int64_t rank) const;
  std::string Describe(int64_t rank) const;
  void Ring(int64_t member);
  void RingOthers();
  void Sleep(uint32_t seen, double seconds);

  void Submit(std::shared_ptr<Pending> pending);
  // Hands what may run to the threads of its ranks; returns the time at which something else can be
  // delivered, or the farthest time.
  Clock::time_point Progress();
  bool IsReady(const Pending& pending, Clock::time_point now, Clock::time_point* when) const;
  void Execute(Pending& pending);
  // When all that a finish takes has come; nanoseconds.
  int64_t DeliveredAt(int64_t channel, int64_t rank) const;
  void HandOver(int64_t rank, std::function<void()> work);
  void CheckWaiting();
  void RunProgressThread();

  EpGroupOptions options_;
  int fd_ = -1;
  char* memory_ = nullptr;
  int64_t memory_bytes_ = 0;
  std::vector<std::atomic<uint8_t>> active_;
  std::map<int64_t, int64_t> rank_of_device_;
  std::atomic<uint64_t> epoch_{1};
  uint64_t agreed_ = 0;
  std::atomic<uint64_t> wakes_{0};
  uint64_t seen_wakes_ = 0;

  // How often each local rank has started and finished on each channel in this epoch, and when it
  // last started.
  std::vector<std::atomic<uint64_t>> started_, finished_;
  std::vector<std::atomic<int64_t>> started_at_;
  std::vector<std::atomic<int64_t>> link_free_at_;

  mutable std::mutex mutex_;
  std::list<std::shared_ptr<Pending>> pending_;
  std::atomic<bool> stop_{false};
  std::vector<std::unique_ptr<Worker>> workers_;  // by local rank
  std::thread progress_thread_;
};

// The group of this process, null when there is none.
std::shared_ptr<EpGroup> CurrentEpGroup();
void SetCurrentEpGroup(std::shared_ptr<EpGroup> group);

}  // namespace jaxmoe
