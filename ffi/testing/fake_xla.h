// A stand-in for XLA's runtime: registered types, the thread pool and the function table.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ffi/common/registrations.h"
#include "xla/ffi/api/c_api.h"

namespace moe_lb::testing {

// Registered types, the thread pool and the function table.
class FakeXla {
 public:
  explicit FakeXla(size_t num_threads = 2);
  ~FakeXla();
  FakeXla(const FakeXla&) = delete;
  FakeXla& operator=(const FakeXla&) = delete;

  // Assigns ids to types and queries the metadata of handlers, as XLA does. Returns the message of the first failure.
  std::optional<std::string> Register(const Registrations& part);

  const XLA_FFI_Api& api() const { return api_; }

  // Names of the handlers whose calls XLA may record into a graph.
  const std::set<std::string>& graph_handlers() const { return graph_handlers_; }

  // Used by the function table.
  const XLA_FFI_TypeInfo* type_info(XLA_FFI_TypeId id) const;
  void Schedule(std::function<void()> task);
  size_t num_threads() const { return threads_.size(); }

 private:
  void RunTasks();

  XLA_FFI_Api api_;
  std::set<std::string> graph_handlers_;
  std::vector<const XLA_FFI_TypeInfo*> types_;  // of type 1, 2, ...
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace moe_lb::testing
