// A minimal test framework: a failed expectation prints its location and exits the process with 1. Unlike `assert`, it
// is active with NDEBUG, which releases and sanitizer builds define.
#pragma once

#include <cstdlib>
#include <iostream>

namespace moe_lb {

template <typename A, typename B>
void ExpectEqual(const A& a, const B& b, const char* what, const char* file, int line) {
  if (a == b) return;
  std::cerr << file << ":" << line << ": " << what << ": " << a << " != " << b << std::endl;
  std::exit(1);
}

inline void Expect(bool ok, const char* what, const char* file, int line) { ExpectEqual(ok, true, what, file, line); }

}  // namespace moe_lb

#define EXPECT(condition) moe_lb::Expect(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
#define EXPECT_EQ(a, b) moe_lb::ExpectEqual((a), (b), #a " == " #b, __FILE__, __LINE__)
