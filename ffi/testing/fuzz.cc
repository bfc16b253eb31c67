#include "ffi/testing/fuzz.h"

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ffi/testing/fake_xla.h"
#include "ffi/testing/random_calls.h"
#include "ffi/testing/valid_calls.h"

// ---- sanitizers ----------------------------------------------------------------

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
constexpr uint64_t kCases = 5000;   // under sanitizers; the nightly run has more, and other ones
constexpr uint64_t kCalls = 10000;  // of each handler, by the test of repetition

// Visible to the sanitizers' libraries.
#define MOE_LB_VISIBLE extern "C" __attribute__((visibility("default")))

// Limit the allocations of a handler. The quarantine is small, because memory is measured. A sanitizer report ends in
// PrintRunning, through an abort for sanitizers other than ASan.
MOE_LB_VISIBLE const char* __asan_default_options() {
  return "hard_rss_limit_mb=3072:quarantine_size_mb=8:thread_local_quarantine_size_kb=64:handle_abort=1";
}
MOE_LB_VISIBLE const char* __ubsan_default_options() { return "halt_on_error=1:print_stacktrace=1:abort_on_error=1"; }
MOE_LB_VISIBLE const char* __tsan_default_options() { return "halt_on_error=1:second_deadlock_stack=1"; }
MOE_LB_VISIBLE void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace moe_lb::testing {
namespace {

// Twice the time-out of valid calls, so that a handler has time to report a missing rank.
constexpr auto kLimit = std::chrono::seconds(60);  // a longer call counts as a hang

constexpr double kShortTimeout = 0.01;  // seconds

// ---- report of the running case, for crashes -----------------------------------

enum class Kind { kValid, kMutated, kScrambled, kAny };

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kValid:
      return "valid";
    case Kind::kMutated:
      return "mutated";
    case Kind::kScrambled:
      return "scrambled";
    case Kind::kAny:
      return "any";
  }
  return "";
}

struct Case {
  const HandlerRegistration* handler;
  Kind kind;
  uint64_t number;
  Call call;
};

uint64_t seed_of_run = 0;
const Case* running = nullptr;

void Print(const Case& one) {
  std::cerr << "seed " << seed_of_run << ", case " << one.number << ": " << NameOf(one.kind) << " call of "
            << one.handler->name << "\n  " << Describe(one.call) << std::endl;
}

void PrintRunning() {
  if (running != nullptr) Print(*running);
}

[[noreturn]] void Fail(const Case& one, const std::string& what) {
  std::cerr << "FAILED: " << what << std::endl;
  running = nullptr;
  Print(one);
  std::_Exit(1);
}

void OnSignal(int signal) {
  std::cerr << "signal " << signal << (signal == SIGALRM ? ": a handler does not return" : "") << std::endl;
  PrintRunning();
  std::_Exit(1);
}

void WatchForDeath() {
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(PrintRunning);
  std::signal(SIGALRM, OnSignal);
  // A sanitizer prints its own report of these signals, and reserves more addresses than any limit allows.
  if (kSanitized) return;
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, OnSignal);
  const rlimit memory = {size_t{6} << 30, size_t{6} << 30};
  setrlimit(RLIMIT_AS, &memory);
}

// ---- running cases -------------------------------------------------------------

struct Counts {
  uint64_t valid = 0;
  uint64_t succeeded = 0;  // among calls not valid by construction
  uint64_t refused = 0;
};

// Calls in progress.
class Runner {
 public:
  Runner(FakeXla& xla, const Registrations& part, size_t max_pending)
      : xla_(xla), part_(part), max_pending_(max_pending) {}
  ~Runner() { Drain(0); }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  void Run(Case one, Random& random) {
    // On the heap, so that its address stays valid.
    pending_.push_back(std::make_unique<Pending>());
    Pending& pending = *pending_.back();
    pending.one = std::move(one);
    pending.site = MakeSite(pending.one);
    Execute(pending, *pending.site, random);
    // Calls overlap on purpose: earlier ones are verified only after many are pending, so that calls of other sites run
    // concurrently.
    Drain(max_pending_);
  }

  std::shared_ptr<CallSite> MakeSite(const Case& one) {
    running = &one;
    try {
      return std::make_shared<CallSite>(xla_, *one.handler, one.call.attributes);
    } catch (const std::exception& error) {
      Fail(one, std::string("the instantiate stage threw: ") + error.what());
    }
  }

  // Makes another call of an existing site.
  void RunAgain(const Case& one, std::shared_ptr<CallSite> site, Random& random) {
    pending_.push_back(std::make_unique<Pending>());
    Pending& pending = *pending_.back();
    pending.one = one;
    pending.site = std::move(site);
    Execute(pending, *pending.site, random);
    Drain(max_pending_);
  }

  // Waits until at most this many calls are in progress.
  void Drain(size_t count) {
    while (pending_.size() > count) {
      Check(*pending_.front());
      pending_.pop_front();
    }
    while (!pending_.empty() && pending_.front()->IsOver()) {
      Check(*pending_.front());
      pending_.pop_front();
    }
  }

  const std::map<std::string, Counts>& counts() const { return counts_; }

 private:
  struct Pending {
    Case one;
    std::shared_ptr<CallSite> site;
    std::vector<std::shared_ptr<Execution>> executions;

    bool IsOver() const {
      for (const auto& execution : executions) {
        if (!execution->is_over()) return false;
      }
      return true;
    }
  };

  void Execute(Pending& pending, CallSite& site, Random& random) {
    running = &pending.one;
    alarm(static_cast<unsigned>(kLimit.count()));
    if (!site.instantiated().ok) return;
    const int64_t run_id = ++runs_ * (random.Chance(10) ? -1 : 1);
    const PoolMode pool = random.Of(std::vector<PoolMode>{PoolMode::kThreads, PoolMode::kInline, PoolMode::kNone});
    if (pending.one.call.before != nullptr) ExecuteBefore(pending.one, run_id, pool);
    const std::vector<Operands>& devices = pending.one.call.devices;
    std::vector<size_t> order(devices.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    // Devices start in random order, as in XLA.
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(random.Below(static_cast<int64_t>(i)))]);
    }
    const auto valid = AllValidCalls().find(pending.one.handler->name);
    const bool blocks = valid->second.blocks && devices.size() > 1;
    pending.executions.resize(devices.size());
    std::vector<std::thread> threads;
    for (const size_t device : order) {
      const auto execute = [&pending, &site, &devices, device, run_id, pool] {
        try {
          pending.executions[device] = site.Execute(devices[device], run_id, static_cast<int32_t>(device), pool);
        } catch (const std::exception& error) {
          Fail(pending.one, std::string("the handler threw: ") + error.what());
        }
      };
      // Without threads the first device would deadlock, because this loop has not called the others.
      if (blocks) {
        threads.emplace_back(execute);
      } else {
        execute();
      }
    }
    for (std::thread& thread : threads) thread.join();
    alarm(0);
  }

  // Makes the program's previous call and inserts its results.
  void ExecuteBefore(Case& one, int64_t run_id, PoolMode pool) {
    const Before& before = *one.call.before;
    const std::vector<Operands>& devices = before.call.devices;
    CallSite site(xla_, Find(before.handler), before.call.attributes);
    std::vector<std::shared_ptr<Execution>> executions;
    for (size_t device = 0; device < devices.size(); ++device) {
      executions.push_back(site.Execute(devices[device], run_id, static_cast<int32_t>(device), pool));
    }
    for (size_t device = 0; device < devices.size(); ++device) {
      const std::optional<Ending> ending = executions[device]->Wait(kLimit);
      if (!ending || !ending->ok) Fail(one, "the call before: " + (ending ? ending->message : "it does not end"));
      if (device >= one.call.devices.size()) continue;
      std::vector<Array>& args = one.call.devices[device].args;
      for (const auto& [ret, arg] : before.wires) {
        const Array& from = ending->rets[ret];
        const bool unchanged = arg < args.size() && args[arg].bytes == Result(from.dtype, from.dims).bytes;
        // A mutated operand keeps its value, which is the subject of the case.
        if (unchanged) args[arg].bytes = from.bytes;
      }
    }
  }

  const HandlerRegistration& Find(const std::string& name) const {
    for (const HandlerRegistration& handler : part_.handlers) {
      if (handler.name == name) return handler;
    }
    throw std::invalid_argument("no handler " + name);
  }

  void Check(Pending& pending) {
    const Case& one = pending.one;
    running = &one;
    bool ok = CheckOne(one, pending.site->instantiated());
    for (size_t device = 0; device < pending.executions.size(); ++device) {
      const std::optional<Ending> ending = pending.executions[device]->Wait(kLimit);
      if (!ending) Fail(one, "the call does not end");
      ok = CheckOne(one, *ending) && ok;
      if (ending->ok) CheckResults(one, one.call.devices[device], ending->rets);
    }
    Counts& counts = counts_[one.handler->name];
    (one.kind == Kind::kValid ? counts.valid : ok ? counts.succeeded : counts.refused) += 1;
  }

  static bool CheckOne(const Case& one, const Ending& ending) {
    if (ending.wrote_argument) Fail(one, "an argument was written");
    if (ending.ok) return true;
    if (ending.message.empty()) Fail(one, "an error without a message");
    if (ending.code == XLA_FFI_Error_Code_OK) Fail(one, "an error with the code of success: " + ending.message);
    if (one.kind == Kind::kValid) Fail(one, "a valid call was refused: " + ending.message);
    return false;
  }

  static void CheckResults(const Case& one, const Operands& operands, const std::vector<Array>& rets) {
    const auto& verify = AllValidCalls().at(one.handler->name).verify;
    if (verify == nullptr) return;
    const std::string wrong = verify(one.call.attributes, operands, rets);
    if (!wrong.empty()) Fail(one, "a call succeeded, and " + wrong);
  }

  FakeXla& xla_;
  const Registrations& part_;
  const size_t max_pending_;
  std::deque<std::unique_ptr<Pending>> pending_;
  std::map<std::string, Counts> counts_;
  int64_t runs_ = 0;
};

void ShortenTimeout(Call& call) {
  const auto timeout = call.attributes.find("timeout_s");
  if (timeout != call.attributes.end()) timeout->second = Double(kShortTimeout);
  if (call.before == nullptr || !call.before->sets_timeout) return;
  auto before = std::make_shared<Before>(*call.before);
  ShortenTimeout(before->call);
  call.before = before;
}

Case MakeCase(const HandlerRegistration& handler, uint64_t number, Random& random) {
  const int64_t draw = random.Below(100);
  const Kind kind = draw < 15 ? Kind::kValid : draw < 65 ? Kind::kMutated : draw < 92 ? Kind::kScrambled : Kind::kAny;
  Case one = {&handler, kind, number, {}};
  if (kind == Kind::kAny) {
    one.call = AnyCall(random);
    return one;
  }
  one.call = AllValidCalls().at(handler.name).make(random);
  // A broken device may leave the others waiting until their time-out, and such cases are frequent.
  if (kind != Kind::kValid) ShortenTimeout(one.call);
  if (kind == Kind::kMutated) Mutate(random, one.call);
  if (kind == Kind::kScrambled) Scramble(random, one.call);
  return one;
}

// Random numbers of one case. They are independent of earlier cases, so that a failed case can be run alone.
Random RandomOf(uint64_t seed, uint64_t number) {
  return Random(seed * 0x9E3779B97F4A7C15u + number * 0xD1B54A32D192ED03u);
}

int Fuzz(FakeXla& xla, const Registrations& part, uint64_t cases, uint64_t seed, std::optional<uint64_t> only) {
  const std::vector<HandlerRegistration>& handlers = part.handlers;
  seed_of_run = seed;
  Runner runner(xla, part, 1024);
  for (uint64_t number = 0; number < cases; ++number) {
    if (only && number != *only) continue;
    Random random = RandomOf(seed, number);
    Case one = MakeCase(handlers[number % handlers.size()], number, random);
    if (only) Print(one);
    runner.Run(std::move(one), random);
  }
  runner.Drain(0);
  running = nullptr;
  bool all_seen = true;
  for (const HandlerRegistration& handler : handlers) {
    const auto found = runner.counts().find(handler.name);
    const Counts counts = found == runner.counts().end() ? Counts() : found->second;
    std::cout << handler.name << ": " << counts.valid << " valid calls succeeded; of the others " << counts.succeeded
              << " succeeded, " << counts.refused << " were refused" << std::endl;
    all_seen = all_seen && counts.valid > 0 && counts.succeeded > 0 && counts.refused > 0;
  }
  // If no broken call succeeds, or all do, the cases do not pass the handler's first check, or do not reach one.
  if (all_seen || only) return 0;
  std::cerr << "FAILED: a handler never succeeded, or never refused" << std::endl;
  return 1;
}

// ---- repetition ----------------------------------------------------------------

struct Usage {
  int64_t memory;  // resident, bytes
  int64_t files;
  int64_t threads;
};

int64_t NumEntries(const char* path) {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(path)) ++count;
  return count;
}

Usage Measure() {
  malloc_trim(0);
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  statm >> size >> resident;
  return {resident * sysconf(_SC_PAGESIZE), NumEntries("/proc/self/fd"), NumEntries("/proc/self/task")};
}

// Calls alternate between a new call site and a persistent one.
void CallMany(Runner& runner, const std::vector<Case>& cases, uint64_t calls, Random& random) {
  std::vector<std::shared_ptr<CallSite>> sites;
  for (const Case& one : cases) sites.push_back(runner.MakeSite(one));
  for (uint64_t i = 0; i < calls; ++i) {
    const size_t chosen = i % cases.size();
    runner.RunAgain(cases[chosen], sites[chosen], random);
    runner.Run(cases[chosen], random);
  }
  runner.Drain(0);
}

int Repeat(FakeXla& xla, const Registrations& part, uint64_t calls) {
  constexpr int64_t kMaxGrowth = 4 << 20;
  int failures = 0;
  for (const HandlerRegistration& handler : part.handlers) {
    std::vector<Case> cases;
    Random random = RandomOf(0, 0);
    for (uint64_t number = 0; number < 100; ++number) cases.push_back(MakeCase(handler, number, random));
    // Keep few calls in progress, because the peak number of threads is not measured.
    Runner runner(xla, part, 8);
    // Compare memory after a first round, which makes all one-time allocations: threads, tables, the
    // allocator's arenas.
    CallMany(runner, cases, calls, random);
    const Usage before = Measure();
    CallMany(runner, cases, calls, random);
    // Idle threads end after a while.
    const auto is_flat = [&](const Usage& after) {
      return after.memory - before.memory < kMaxGrowth && after.files <= before.files &&
             after.threads <= before.threads;
    };
    Usage after = Measure();
    for (int tries = 0; !is_flat(after) && tries < 30; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      after = Measure();
    }
    running = nullptr;
    const bool flat = is_flat(after);
    std::cout << handler.name << ": " << 2 * calls << " calls, memory " << (after.memory - before.memory) / 1024
              << " KiB, files " << after.files - before.files << ", threads " << after.threads - before.threads
              << (flat ? "" : "  FAILED: not flat") << std::endl;
    failures += flat ? 0 : 1;
  }
  return failures;
}

// ---- the command line ----------------------------------------------------------

// Requires valid calls for every handler, and its registration by XLA.
bool Register(FakeXla& xla, const Registrations& part) {
  if (const std::optional<std::string> bad = xla.Register(part)) {
    std::cerr << "FAILED: " << *bad << std::endl;
    return false;
  }
  for (const HandlerRegistration& handler : part.handlers) {
    if (AllValidCalls().count(handler.name) != 0) continue;
    std::cerr << "FAILED: no ffi/testing/valid_*_calls.cc has " << handler.name << std::endl;
    return false;
  }
  return true;
}

}  // namespace

int FuzzMain(const Registrations& part, int argc, char** argv, uint64_t without_sanitizers) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  const auto number = [&](size_t i, uint64_t otherwise) { return i < args.size() ? std::stoull(args[i]) : otherwise; };
  WatchForDeath();
  FakeXla xla;
  if (!Register(xla, part)) return 1;
  if (!args.empty() && args[0] == "repeat") return Repeat(xla, part, number(1, kCalls)) == 0 ? 0 : 1;
  const auto only = args.size() > 2 ? std::optional<uint64_t>(number(2, 0)) : std::nullopt;
  const uint64_t cases = kSanitized ? kCases : without_sanitizers;
  if (Fuzz(xla, part, number(0, cases), number(1, 1), only) != 0) return 1;
  return 0;
}

}  // namespace moe_lb::testing
