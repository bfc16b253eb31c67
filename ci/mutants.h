// Included before every other header of the sources that ci/mutants.py generates. Selects one of their mutants.
//
// The environment variable MUTANT is the number of the active mutant, from 1 on. REACHED is a file with a byte for each
// mutant, which a test sets if it executes the mutated place.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

namespace mutants {

inline const int active = [] {
  const char* const number = std::getenv("MUTANT");
  return number == nullptr ? 0 : std::atoi(number);
}();

inline volatile char* const reached = []() -> char* {
  const char* const path = std::getenv("REACHED");
  if (path == nullptr) return nullptr;
  const int file = open(path, O_RDWR | O_CLOEXEC);
  void* const bytes = mmap(nullptr, static_cast<size_t>(lseek(file, 0, SEEK_END)), PROT_WRITE, MAP_SHARED, file, 0);
  if (bytes == MAP_FAILED) std::abort();
  close(file);
  return static_cast<char*>(bytes);
}();

// Static objects may be used before `active` is set: no mutant is active then.
inline bool Is(int mutant) {
  if (reached != nullptr) reached[mutant] = 1;
  return mutant == active;
}

// if (Keep(7)) statement;
inline bool Keep(int mutant) { return !Is(mutant); }
// a + One(7), and task + None(7)
inline int One(int mutant) { return Is(mutant) ? 0 : 1; }
inline int None(int mutant) { return Is(mutant) ? 1 : 0; }

// f(Either<7>(a, b), Either<7>(b, a)); of one type alone, and an error names the number
template <int kMutant, typename T>
const T& Either(const T& a, const T& b) {
  return Is(kMutant) ? b : a;
}

// a < Swap{7} < b: comparisons associate to the left, so this needs no parser of the operands.
struct Swap {
  int mutant;
};

#define MUTANTS_SWAP(Name, op, mutated)                                            \
  template <typename A>                                                            \
  struct Name {                                                                    \
    const A& a;                                                                    \
    int mutant;                                                                    \
  };                                                                               \
  template <typename A>                                                            \
  Name<A> operator op(const A& a, Swap swap) {                                     \
    return {a, swap.mutant};                                                       \
  }                                                                                \
  template <typename A, typename B>                                                \
  bool operator op(const Name<A>& left, const B& b) {                              \
    return Is(left.mutant) ? left.a mutated b : left.a op b;                       \
  }

MUTANTS_SWAP(Less, <, <=)
MUTANTS_SWAP(LessEqual, <=, <)
MUTANTS_SWAP(Greater, >, >=)
MUTANTS_SWAP(GreaterEqual, >=, >)

}  // namespace mutants
