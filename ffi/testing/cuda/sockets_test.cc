// Sockets between four processes with one stand-in GPU each: a kill between any two sends, a process that does not
// read, failing system calls, and the name of the process that has ended first.
#include "ffi/testing/cuda/sockets.h"

#include <errno.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/testing/cuda/copy_layer.h"
#include "ffi/testing/cuda/layer_runs.h"
#include "ffi/testing/cuda/processes.h"
#include "ffi/transport/neighbours_cuda.h"

// Without the option it waits a second before the end of each process.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() { return "atexit_sleep_ms=0"; }

namespace {

using namespace moe_lb::testing;
using moe_lb::Neighbours;
using moe_lb::PeerNote;
using moe_lb::SocketOutcome;
using moe_lb::SocketResult;

constexpr int64_t kCount = 4;
constexpr int64_t kVictim = 1;
constexpr int64_t kMoves = 3;
constexpr int64_t kRuns = 5;
constexpr int64_t kForever = int64_t{1} << 40;

// Argument of a child: the number of successful calls before the fault, or its function, number and error.
std::string option;

std::string Victim(int64_t rank) { return "rank " + std::to_string(rank) + " of " + std::to_string(kCount); }

LayerShape Shape(double timeout_s) {
  LayerShape shape;
  shape.ranks = kCount;
  shape.processes = ProcessesUpTo(kCount);
  shape.timeout_s = timeout_s;
  return shape;
}

// ---- parts of each process ---------------------------------------------------------

// Makes the first runs with other memory each time, so that they send notes, and prints the first failure. before:
// called before each run.
void RunMoving(int64_t rank, double timeout_s, const std::function<void(int64_t run)>& before) {
  CopyLayer copies(Shape(timeout_s), true);
  Gpu gpu(0, 0, MemoryKind::kMapped);
  Ending ending;
  int64_t num_wrong = 0;
  for (int64_t run = 1; ending.ok && run <= kRuns; ++run) {
    before(run);
    // A notice may come late.
    if (run == kRuns) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ending = copies.Run(gpu, rank, run);
    Synchronize(gpu.stream());
    // A process that ends during a run leaves its copies incomplete, and the next run fails.
    EXPECT(!ending.ok || num_wrong == 0);
    num_wrong = copies.num_wrong();
    // Also if the first try to send the notice has failed.
    EXPECT(!ending.ok || run < kRuns || NumMapped() <= kCount - 1);
    if (ending.ok && run < kMoves) gpu.MoveShared();
  }
  std::cout << ending.code << " " << ending.message << std::endl;
}

void DieAtSend(int64_t rank, int64_t) {
  if (rank == kVictim) DieAtSocketCall("sendmsg", std::stoll(option));
  RunMoving(rank, 30, [](int64_t) {});
}

// option: function, number of successful calls and error, such as "sendmsg 3 11".
void FailOne(int64_t rank, int64_t) {
  const size_t first = option.find(' '), second = option.rfind(' ');
  const int error = std::stoi(option.substr(second));
  if (rank == kVictim) FailSocketCalls(option.substr(0, first), std::stoll(option.substr(first)), error);
  RunMoving(rank, 30, [](int64_t) {});
}

// The last rank sees the ends of all others at once.
void EndWhileOneIsStopped(int64_t rank, int64_t) {
  RunMoving(rank, 30, [rank](int64_t run) {
    if (run == 2 && rank == 2) kill(getpid(), SIGKILL);
    if (run == 2 && rank == 3) kill(getpid(), SIGSTOP);
  });
}

// The victim reads no message from the second run on, and its buffers are full. It makes this run after all others have
// ended. The last rank starts after the other two have ended, and reads the failure in their pages.
void NeverRead(int64_t rank, int64_t) {
  RunMoving(rank, 1, [rank](int64_t run) {
    if (run != 2) return;
    if (rank == kVictim) FailSocketCalls("recvmsg", 0, EAGAIN, kForever);
    if (rank == kVictim || rank == kCount - 1) {
      return std::this_thread::sleep_for(std::chrono::seconds(rank == kVictim ? 5 : 3));
    }
    PeerNote note;
    note.kind = PeerNote::kProbe;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    while (!Neighbours::OfProcess().Send(kVictim, note, -1, 0).problem) {
    }
  });
}

// A stopped process: sends wait up to their time limit, name it, and succeed once it runs again.
void SendToStopped(int64_t rank, int64_t) {
  Neighbours& neighbours = Neighbours::OfProcess();
  PeerNote note, end;
  moe_lb::Descriptor none;
  note.kind = end.kind = PeerNote::kProbe;
  end.id = 1;
  if (rank > 1) return;
  if (rank == 1) {
    note.size = static_cast<uint64_t>(getpid());
    EXPECT(!neighbours.Send(0, note, -1, 30).problem);
    while (!neighbours.Take(0, PeerNote::kProbe, 1, &end, &none)) std::this_thread::yield();
    return;
  }
  while (!neighbours.Take(1, PeerNote::kProbe, 0, &note, &none)) std::this_thread::yield();
  const auto stopped = static_cast<pid_t>(note.size);
  kill(stopped, SIGSTOP);
  SocketResult sent;
  while (!sent.problem) sent = neighbours.Send(1, note, -1, 0.3);
  EXPECT(sent.outcome == SocketOutcome::kStalled && sent.process == 1);
  EXPECT_EQ(*sent.problem,
            std::string("process 1: it has not read its messages for 0.3 s; expected all processes to run"));
  std::thread later([stopped] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    kill(stopped, SIGCONT);
  });
  EXPECT(!neighbours.Send(1, end, -1, 30).problem);
  later.join();
}

const ProcessParts kParts = {
    {"die", DieAtSend},        {"fail", FailOne},          {"first", EndWhileOneIsStopped},
    {"never_read", NeverRead}, {"stopped", SendToStopped},
};

// ---- the test ----------------------------------------------------------------------

using Children = std::vector<std::unique_ptr<ChildProcess>>;

std::string Internal() { return std::to_string(XLA_FFI_Error_Code_INTERNAL) + " "; }
std::string Ok() { return "0 "; }

// All others name the victim, whatever they did at that time. Returns false if it made fewer sends.
bool OneDiesAt(const std::string& program, int64_t number) {
  const Children children = StartProcesses(program, "die", kCount, std::to_string(number));
  const std::string own = children[kVictim]->ReadLine();
  for (int64_t rank = 0; rank < kCount; ++rank) {
    if (rank == kVictim) continue;
    const std::string said = children[static_cast<size_t>(rank)]->ReadLine();
    const std::string want = own.empty() ? Internal() : Ok();
    EXPECT_EQ(said.substr(0, want.size()), want);
    if (own.empty() && !Has(said, Victim(kVictim) + " has ended (process 1)")) EXPECT_EQ(said, Victim(kVictim));
  }
  return own.empty();
}

void AnySend(const std::string& program) {
  int64_t number = 0;
  while (OneDiesAt(program, number)) ++number;
  std::cerr << "killed before each of " << number << " sends" << std::endl;
  // Pages, memory and notices of freed memory, to three processes.
  EXPECT_EQ(number, (kCount - 1) * (1 + kMoves + kMoves - 1));
}

// A stall passes unnoticed, and the notice of freed memory is sent again. Another error ends all processes, each with
// one line that names it. Returns whether they ended.
bool OneFailure(const std::string& program, const std::string& function, int64_t number, int error) {
  const std::string fault = function + " " + std::to_string(number) + " " + std::to_string(error);
  const Children children = StartProcesses(program, "fail", kCount, fault);
  int64_t num_ended = 0;
  for (int64_t rank = 0; rank < kCount; ++rank) {
    const std::string said = children[static_cast<size_t>(rank)]->ReadLine();
    const bool names = Has(said, std::strerror(error)) || Has(said, Victim(kVictim) + " has ended");
    const bool good = said == Ok() || (said.rfind(Internal(), 0) == 0 && names);
    if (!good) EXPECT_EQ(fault + ", rank " + std::to_string(rank) + ": " + said, std::string("a named error"));
    EXPECT(children[static_cast<size_t>(rank)]->Succeeded());
    num_ended += said != Ok();
  }
  EXPECT(num_ended == 0 || num_ended == kCount);
  EXPECT(num_ended == 0 || (error != EAGAIN && error != EINTR));
  return num_ended > 0;
}

// step: of the numbers of calls.
void AnyFailure(const std::string& program, int64_t step) {
  int64_t num_tried = 0, num_ended = 0;
  for (const std::string function : {"sendmsg", "recvmsg"}) {
    for (const int error : {ENOSPC, EIO, EAGAIN, EINTR, EMFILE}) {
      // Each process sends as many notes; several may arrive together.
      for (int64_t number = error % step; number < (kCount - 1) * 2 * kMoves; number += step) {
        num_ended += OneFailure(program, function, number, error);
        ++num_tried;
      }
    }
  }
  std::cerr << "failed " << num_tried << " calls, which ended " << num_ended << " programs" << std::endl;
  EXPECT(num_ended > 0);
}

void FirstIsNamed(const std::string& program) {
  const Children children = StartProcesses(program, "first", kCount);
  for (const size_t rank : {0u, 1u, 3u}) {
    if (rank == 3) children[3]->Signal(SIGCONT);
    const std::string said = children[rank]->ReadLine();
    if (!Has(said, Victim(2) + " has ended (process 2)")) EXPECT_EQ(said, Victim(2));
    EXPECT(children[rank]->Succeeded());
  }
}

void FullBuffersAreNamed(const std::string& program) {
  const Children children = StartProcesses(program, "never_read", kCount);
  const std::string code = std::to_string(XLA_FFI_Error_Code_DEADLINE_EXCEEDED) + " ";
  int num_named = 0;
  for (const size_t rank : {0u, 2u, 3u}) {
    const std::string said = children[rank]->ReadLine();
    const bool is_named = Has(said, "process 1: it has not read its messages for 1 s");
    EXPECT_EQ(said.substr(0, code.size()), code);
    // Another rank may reach the time limit first, as it waits for one that sends.
    if (!is_named && !Has(said, "did not arrive within 1 s")) EXPECT_EQ(said, Victim(kVictim));
    num_named += is_named;
  }
  EXPECT(num_named > 0);
}

}  // namespace

// Without arguments, run the test; with a part and a number, that part; a child also has its rank. `--parts` prints
// them, for ci/mutants.py. `fail 1` fails all calls, and takes minutes.
int main(int argc, char** argv) {
  if (argc >= 4) {
    option = argc > 4 ? argv[4] : "";
    return RunProcess(argv, kParts);
  }
  const std::string program = argv[0], wanted = argc > 1 ? argv[1] : "";
  const std::vector<std::pair<std::string, std::function<void()>>> parts = {
      {"die 0", [&] { AnySend(program); }},
      {"fail 10", [&] { AnyFailure(program, argc > 2 ? std::stoll(argv[2]) : 10); }},
      {"first 4", [&] { FirstIsNamed(program); }},
      {"never_read 4", [&] { FullBuffersAreNamed(program); }},
      {"stopped 4", [&] { ExpectAllSucceed(program, "stopped", kCount); }},
  };
  for (const auto& [name, run] : parts) {
    if (wanted == "--parts") std::cout << name << std::endl;
    if (wanted.empty() || name.substr(0, name.find(' ')) == wanted) run();
  }
}
