#include "ffi/transport/rendezvous.h"

#include <sstream>

#include "ffi/transport/start_thread.h"

namespace moe_lb {

namespace {

// A generation allocates an entry per rank, so an attribute must not request unbounded memory.
constexpr int64_t kMaxPlaces = 1 << 16;

}  // namespace

Status CheckOptions(const RendezvousOptions& options) {
  if (options.num_ranks < 1) return Refuse("num_ranks is ", options.num_ranks, "; expected at least 1");
  if (options.num_lanes < 1) return Refuse("num_lanes is ", options.num_lanes, "; expected at least 1");
  if (options.num_ranks > kMaxPlaces) {
    return Refuse("num_ranks is ", options.num_ranks, "; expected at most ", kMaxPlaces);
  }
  if (options.num_lanes > kMaxPlaces) {
    return Refuse("num_lanes is ", options.num_lanes, "; expected at most ", kMaxPlaces);
  }
  // A NaN fails both comparisons, so it fails here too.
  // The upper bound keeps deadlines far from the end of the clock.
  if (!(options.timeout.count() > 0 && options.timeout.count() <= 1e6)) {
    return Refuse("timeout_s is ", options.timeout.count(), "; expected above 0 and at most 1e6");
  }
  // The first generation would start it under a lock.
  return StartThread([] { static_cast<void>(Watchdog::OfProcess()); });
}

std::string MissingMessage(const RendezvousOptions& options, const std::vector<int64_t>& missing) {
  std::ostringstream message;
  message << options.site << ": rank " << missing.front() << " of " << options.num_ranks << " did not arrive within "
          << options.timeout.count() << " s; missing ranks:";
  for (const int64_t rank : missing) message << " " << rank;
  return message.str();
}

}  // namespace moe_lb
