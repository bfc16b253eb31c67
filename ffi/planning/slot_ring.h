// Bookkeeping of a fixed number of buffers used asynchronously by a device.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

namespace moe_lb {

// A slot goes from free to reserved (one host thread fills it and queues work on it), to in flight
// (queued work will read or write it), and back once that work has finished. Thread-safe.
class SlotRing {
 public:
  // Returns true if all work queued on a slot has finished. Called under the ring's lock, for slots in flight.
  using Finished = std::function<bool(size_t slot)>;

  explicit SlotRing(size_t num_slots) : states_(num_slots, State::kFree) {}

  // Reserves a slot for the caller; nullopt if none came free within `patience`, or if all are retired.
  std::optional<size_t> Reserve(const Finished& finished, std::chrono::milliseconds patience);

  // Marks a reserved slot as in flight after all its work is queued; `finished` then reports its end.
  void Launch(size_t slot);

  // Retires a reserved slot whose end of work cannot be detected: it is never used again.
  void Retire(size_t slot);

  // Waits until no slot is reserved or in flight. Returns false after `patience`, or if some slot is retired: its
  // memory must not be freed.
  bool Drain(const Finished& finished, std::chrono::milliseconds patience);

 private:
  enum class State { kFree, kReserved, kInFlight, kRetired };

  void Free(const Finished& finished);
  bool Any(State state) const;

  std::mutex mutex_;
  std::vector<State> states_;
  size_t next_ = 0;
};

}  // namespace moe_lb
