// One CTA on the host: a fibre per thread, shared memory with an owner per byte, mbarriers and named barriers.
//
// Barriers follow the PTX ISA (mbarrier phases, pending arrivals, transaction count; bar.sync). A thread that waits gives
// way to another; when none can go on, the CTA hangs and the report lists what each thread waits for.
#pragma once

#include "report.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace emulate {

/// In which order threads that could run do run. The first thread is the producer.
enum class Schedule { producer_first, producer_last, random };

inline char const* name_of(Schedule schedule) {
  return schedule == Schedule::producer_first  ? "producer first"
         : schedule == Schedule::producer_last ? "producer last"
                                               : "random";
}

struct Hang {};

/// Shared memory that ends at a page that cannot be touched, so that plain loads beyond it fault.
class SharedMemory {
 public:
  static constexpr unsigned char poison = 0xff;  // NaN as ue4m3, ue8m0 and e4m3

  explicit SharedMemory(std::size_t bytes) : size_((bytes + 1023) / 1024 * 1024) {
    std::size_t const page = 4096;
    std::size_t const inner = (size_ + page - 1) / page * page;
    auto* all = static_cast<unsigned char*>(mmap(nullptr, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(all + page, inner, PROT_READ | PROT_WRITE);
    base_ = all + page + inner - size_;
    std::memset(base_, poison, size_);
    owner_.assign(size_, Owner{});
  }

  unsigned char* base() const { return base_; }
  std::size_t size() const { return size_; }
  std::uint32_t address_of(void const* pointer) const {
    // Pointers to 4-bit elements may carry a borrow above bit 47 after negative offsets.
    auto value = reinterpret_cast<std::uintptr_t>(pointer) & ((std::uintptr_t{1} << 48) - 1);
    return static_cast<std::uint32_t>(value - reinterpret_cast<std::uintptr_t>(base_));
  }
  bool holds(std::uint32_t address, std::size_t bytes) const { return address <= size_ && bytes <= size_ - address; }

  /// Copy from the bulk copy engine, for a full barrier in one of its phases. Every byte belongs to one stage of the mainloop
  /// only, or to none (stage -1).
  void deliver(std::uint32_t address, unsigned char const* from, std::size_t bytes, int stage, std::uint32_t phase) {
    for (std::size_t i = 0; i < bytes; ++i) {
      auto& owner = owner_[address + i];
      if (owner.stage >= 0 && owner.stage != stage) {
        report().add("overlapping stages", format("shared memory byte %u is written for stage %d and for stage %d",
                                                  unsigned(address + i), owner.stage, stage));
      } else if (stage >= 0 && owner.stage == stage && owner.phase == phase) {
        report().add("written twice",
                     format("shared memory byte %u is written twice for stage %d in one phase", unsigned(address + i), stage));
      }
      owner = {stage, phase};
    }
    std::memcpy(base_ + address, from, bytes);
  }

  /// A stage was released by all its consumers: whoever still reads it reads NaN.
  void release(int stage) {
    for (std::size_t i = 0; i < size_; ++i) {
      if (owner_[i].stage == stage) base_[i] = poison;
    }
  }

  /// A new run on the same memory.
  void clear() {
    std::memset(base_, poison, size_);
    owner_.assign(size_, Owner{});
  }

 private:
  struct Owner {
    int stage = -1;
    std::uint32_t phase = 0;
  };
  std::size_t size_;
  unsigned char* base_;
  std::vector<Owner> owner_;
};

/// An mbarrier object (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").
struct Barrier {
  std::uint32_t count = 0;                   // arrivals that complete a phase
  std::uint32_t pending = 0;                 // arrivals still missing in this phase
  std::int64_t tx = 0;                       // bytes expected minus bytes delivered
  std::uint32_t phase = 0;                   // completed phases
  std::int64_t expected = 0, delivered = 0;  // of this phase, for the report
};

class Machine {
 public:
  Machine(std::size_t shared_bytes) : shared(shared_bytes) {}

  SharedMemory shared;
  std::function<void(std::uint32_t address, std::int64_t bytes)> on_phase;  // a barrier completes a phase with these bytes
  std::function<void(int thread)> on_switch;                                // another thread goes on
  bool ignores_store_waits = false, ignores_named_barriers = false;         // faults that can be planted
  std::uint64_t mma_count = 0;
  std::int64_t phase_bytes = -1;  // bytes delivered per phase of a full barrier

  // ---- threads

  /// Run `threads` functions to their end as one CTA.
  void run(std::vector<std::function<void()>> const& threads, Schedule schedule, std::uint64_t seed) {
    threads_.clear();
    random_.seed(seed);
    schedule_ = schedule;
    for (auto const& body : threads) {
      auto fibre = std::make_unique<Fibre>();
      fibre->body = body;
      fibre->stack = static_cast<char*>(
          mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      getcontext(&fibre->context);
      fibre->context.uc_stack.ss_sp = fibre->stack;
      fibre->context.uc_stack.ss_size = stack_bytes;
      fibre->context.uc_link = &scheduler_;
      auto const self = reinterpret_cast<std::uintptr_t>(fibre.get());
      makecontext(&fibre->context, reinterpret_cast<void (*)()>(&Machine::enter), 2, static_cast<unsigned>(self >> 32),
                  static_cast<unsigned>(self));
      threads_.push_back(std::move(fibre));
    }
    bool hung = false;
    for (;;) {
      int const next = pick();
      if (next < 0) break;
      current_ = next;
      if (on_switch) on_switch(next);
      swapcontext(&scheduler_, &threads_[next]->context);
      current_ = -1;
    }
    for (auto const& fibre : threads_) {
      if (!fibre->done) hung = true;
    }
    if (hung) describe_hang();
    for (auto const& [thread, stores] : stores_) {
      if (!hung && (!stores.open.empty() || !stores.groups.empty()))
        report().add("unfinished store", format("thread %d ends before its bulk stores have read shared memory", thread));
    }
    stores_.clear();
    for (auto const& fibre : threads_) munmap(fibre->stack, stack_bytes);
    warps_.clear();
    named_.clear();
    barriers_.clear();
    if (hung) throw Hang{};
  }

  int thread() const { return current_; }

  /// Give way until `ready` holds. `what` names what is waited for.
  void wait_until(std::function<bool()> ready, std::string what) {
    auto& self = *threads_[current_];
    if (ready()) {
      if (schedule_ == Schedule::random && random_() % 8 == 0) swapcontext(&self.context, &scheduler_);
      return;
    }
    self.ready = std::move(ready);
    self.what = std::move(what);
    swapcontext(&self.context, &scheduler_);
    self.ready = nullptr;
    self.what.clear();
  }

  // ---- warps: the 32 lanes of `warp` meet; the last one to come performs the instruction for all

  template <class Lane, class Perform>
  void together(int warp, int lane, char const* instruction, Lane* mine, Perform perform) {
    auto& meeting = warps_[warp];
    if (meeting.arrived == 0) meeting.instruction = instruction;
    if (std::strcmp(meeting.instruction, instruction) != 0) {
      report().add("diverged warp",
                   format("warp %d: lane %d is at %s while others are at %s", warp, lane, instruction, meeting.instruction));
    }
    meeting.lanes[lane] = mine;
    ++meeting.arrived;
    auto const generation = meeting.generation;
    if (meeting.arrived == 32) {
      std::array<Lane*, 32> lanes;
      for (int i = 0; i < 32; ++i) lanes[i] = static_cast<Lane*>(meeting.lanes[i]);
      perform(lanes);
      meeting.arrived = 0;
      ++meeting.generation;
      return;
    }
    wait_until([&meeting, generation] { return meeting.generation != generation; },
               std::string("the rest of its warp at ") + instruction);
  }

  void named_barrier(std::uint32_t id, std::uint32_t threads) {
    if (ignores_named_barriers) return;
    auto& barrier = named_[id];
    auto const generation = barrier.generation;
    if (++barrier.arrived == threads) {
      barrier.arrived = 0;
      ++barrier.generation;
      return;
    }
    wait_until([&barrier, generation] { return barrier.generation != generation; },
               format("named barrier %u of %u threads", id, threads));
  }

  // ---- bulk stores: the engine reads shared memory at once or, to show who overwrites it too early, as late as it may

  void store(std::function<void()> move) {
    if (schedule_ == Schedule::producer_first)
      move();
    else
      stores_[current_].open.push_back(std::move(move));
  }
  void store_commit() {
    auto& stores = stores_[current_];
    stores.groups.push_back(std::move(stores.open));
    stores.open.clear();
  }
  /// Wait until at most `pending` of this thread's committed groups have not read their shared memory.
  void store_wait(std::size_t pending) {
    if (ignores_store_waits) return;
    auto& groups = stores_[current_].groups;
    while (groups.size() > pending) {
      for (auto const& move : groups.front()) move();
      groups.erase(groups.begin());
    }
  }

  // ---- mbarriers, by shared memory address

  void barrier_init(std::uint32_t address, std::uint32_t count) {
    barriers_[address] = Barrier{};
    barriers_[address].count = barriers_[address].pending = count;
  }
  void barrier_wait(std::uint32_t address, std::uint32_t parity) {
    auto& barrier = at(address);
    wait_until([&barrier, parity] { return (barrier.phase & 1) != (parity & 1); },
               format("mbarrier at %u, parity %u", address, parity));
  }
  void barrier_arrive(std::uint32_t address) {
    auto& barrier = at(address);
    if (barrier.pending == 0) {
      report().add("too many arrivals",
                   format("mbarrier at %u gets more than its %u arrivals in one phase", address, barrier.count));
      return;
    }
    --barrier.pending;
    settle(address, barrier);
  }
  void barrier_expect(std::uint32_t address, std::uint32_t bytes) {
    auto& barrier = at(address);
    barrier.tx += bytes;
    barrier.expected += bytes;
  }
  void barrier_complete(std::uint32_t address, std::uint32_t bytes) {
    auto& barrier = at(address);
    barrier.tx -= bytes;
    barrier.delivered += bytes;
    settle(address, barrier);
  }
  std::uint32_t barrier_phase(std::uint32_t address) { return at(address).phase; }

 private:
  static constexpr std::size_t stack_bytes = std::size_t{1} << 20;

  struct Fibre {
    ucontext_t context;
    char* stack = nullptr;
    std::function<void()> body;
    std::function<bool()> ready;
    std::string what;
    bool done = false;
  };
  struct Meeting {
    int arrived = 0;
    std::uint64_t generation = 0;
    char const* instruction = "";
    std::array<void*, 32> lanes{};
  };
  struct Named {
    std::uint32_t arrived = 0;
    std::uint64_t generation = 0;
  };
  struct Stores {
    std::vector<std::function<void()>> open;
    std::vector<std::vector<std::function<void()>>> groups;
  };

  static void enter(unsigned high, unsigned low) {
    auto* fibre = reinterpret_cast<Fibre*>((static_cast<std::uintptr_t>(high) << 32) | low);
    fibre->body();
    fibre->done = true;
  }

  bool can_run(int index) const {
    auto const& fibre = *threads_[index];
    return !fibre.done && (!fibre.ready || fibre.ready());
  }

  int pick() {
    int const count = static_cast<int>(threads_.size());
    if (schedule_ == Schedule::producer_first && can_run(0)) return 0;
    int const start = schedule_ == Schedule::random ? static_cast<int>(random_() % count) : last_ + 1;
    for (int i = 0; i < count; ++i) {
      int const candidate = (start + i) % count;
      if (schedule_ != Schedule::random && candidate == 0) continue;
      if (can_run(candidate)) return last_ = candidate;
    }
    return can_run(0) ? 0 : -1;
  }

  Barrier& at(std::uint32_t address) {
    auto found = barriers_.find(address);
    if (found == barriers_.end()) {
      report().add("unknown barrier", format("no mbarrier was initialised at shared memory address %u", address));
      barrier_init(address, 1);
      return barriers_[address];
    }
    return found->second;
  }

  void settle(std::uint32_t address, Barrier& barrier) {
    if (barrier.pending != 0 || barrier.tx != 0) return;
    auto const bytes = barrier.delivered;
    barrier.pending = barrier.count;
    barrier.expected = barrier.delivered = 0;
    ++barrier.phase;
    if (on_phase) on_phase(address, bytes);
  }

  void describe_hang() {
    std::map<std::string, int> waits;
    for (auto const& fibre : threads_) {
      if (!fibre->done) ++waits[fibre->what];
    }
    for (auto const& [what, count] : waits) report().add("hang", format("%d threads wait for %s", count, what.c_str()));
    for (auto const& [address, barrier] : barriers_) {
      if (barrier.pending == 0 && barrier.expected != barrier.delivered) {
        report().add("barrier bytes",
                     format("mbarrier at %u expects %lld bytes, %lld were delivered", address,
                            static_cast<long long>(barrier.expected), static_cast<long long>(barrier.delivered)));
      }
    }
  }

  std::vector<std::unique_ptr<Fibre>> threads_;
  std::map<int, Meeting> warps_;
  std::map<std::uint32_t, Named> named_;
  std::map<std::uint32_t, Barrier> barriers_;
  std::map<int, Stores> stores_;
  ucontext_t scheduler_;
  std::mt19937_64 random_;
  Schedule schedule_ = Schedule::producer_last;
  int current_ = -1;
  int last_ = 0;
};

inline Machine*& current_machine() {
  static Machine* the = nullptr;
  return the;
}
inline Machine& machine() { return *current_machine(); }

}  // namespace emulate
