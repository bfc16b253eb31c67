#include "ffi/planning/slot_ring.h"

#include <algorithm>
#include <thread>

namespace moe_lb {
namespace {

using Clock = std::chrono::steady_clock;

// The end of device work sends no notification, so poll for it.
constexpr std::chrono::microseconds kPollInterval(50);

}  // namespace

std::optional<size_t> SlotRing::Reserve(const Finished& finished, std::chrono::milliseconds patience) {
  const Clock::time_point deadline = Clock::now() + patience;
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      Free(finished);
      for (size_t i = 0; i < states_.size(); ++i) {
        const size_t slot = (next_ + i) % states_.size();
        if (states_[slot] != State::kFree) continue;
        states_[slot] = State::kReserved;
        // The next search begins behind this slot. Work on a stream ends in queue order, so that slot is the first to
        // come free.
        next_ = slot + 1;
        return slot;
      }
      // With all slots retired, waiting would only delay the error.
      const bool hopeless = !Any(State::kReserved) && !Any(State::kInFlight);
      if (hopeless || Clock::now() >= deadline) return std::nullopt;
    }
    // Sleep without the lock: another thread must be able to launch its reserved slot.
    std::this_thread::sleep_for(kPollInterval);
  }
}

void SlotRing::Launch(size_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  states_[slot] = State::kInFlight;
}

void SlotRing::Retire(size_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  states_[slot] = State::kRetired;
}

bool SlotRing::Drain(const Finished& finished, std::chrono::milliseconds patience) {
  const Clock::time_point deadline = Clock::now() + patience;
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      Free(finished);
      if (!Any(State::kReserved) && !Any(State::kInFlight)) return !Any(State::kRetired);
      if (Clock::now() >= deadline) return false;
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

void SlotRing::Free(const Finished& finished) {
  for (size_t slot = 0; slot < states_.size(); ++slot) {
    if (states_[slot] == State::kInFlight && finished(slot)) states_[slot] = State::kFree;
  }
}

bool SlotRing::Any(State state) const { return std::find(states_.begin(), states_.end(), state) != states_.end(); }

}  // namespace moe_lb
