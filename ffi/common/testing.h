// A minimal test framework: a failed expectation prints its location and exits the process with 1. Unlike `assert`, it
// is active with NDEBUG, which releases and sanitizer builds define.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace moe_lb {

template <typename A, typename B>
void ExpectEqual(const A& a, const B& b, const char* what, const char* file, int line) {
  if (a == b) return;
  std::cerr << file << ":" << line << ": " << what << ": " << a << " != " << b << std::endl;
  std::exit(1);
}

inline void Expect(bool ok, const char* what, const char* file, int line) { ExpectEqual(ok, true, what, file, line); }

namespace testing {

// Makes starts of threads fail, by a default stack for which no machine has room.
class NoThreads {
 public:
  NoThreads() {
    pthread_attr_t huge;
    const bool is_set = pthread_getattr_default_np(&before_) == 0 && pthread_attr_init(&huge) == 0 &&
                        pthread_attr_setstacksize(&huge, size_t{1} << 60) == 0 &&
                        pthread_setattr_default_np(&huge) == 0;
    Expect(is_set, "the stack is set", __FILE__, __LINE__);
  }
  ~NoThreads() { static_cast<void>(pthread_setattr_default_np(&before_)); }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

inline bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace testing

// A name and a function.
using TestParts = std::vector<std::pair<std::string, std::function<void()>>>;

// Runs the part named by the only argument, or all parts if there is none. `--parts` prints the names, for
// ci/mutants.py. Returns the exit status.
inline int RunParts(int argc, char** argv, const TestParts& parts) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  bool found = wanted.empty();
  for (const auto& [name, run] : parts) {
    if (wanted == "--parts") std::cout << name << std::endl;
    if (!wanted.empty() && name != wanted) continue;
    run();
    found = true;
  }
  return found || wanted == "--parts" ? 0 : 2;
}

}  // namespace moe_lb

#define EXPECT(condition) moe_lb::Expect(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
#define EXPECT_EQ(a, b) moe_lb::ExpectEqual((a), (b), #a " == " #b, __FILE__, __LINE__)
