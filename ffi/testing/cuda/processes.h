// Child processes of a test: one run of this program per rank.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace moe_lb::testing {

// One child process. The destructor kills it if it still runs.
class ChildProcess {
 public:
  ChildProcess(const std::string& program, const std::vector<std::string>& arguments);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void WriteLine(const std::string& line);
  std::string ReadLine();  // without its end; empty at the end of the output
  void Kill();
  void Signal(int signal);
  bool Succeeded();  // after its end

 private:
  pid_t id_ = -1;
  FILE* to_ = nullptr;
  FILE* from_ = nullptr;
};

// Starts a process per rank and connects them, as jax.distributed would. Each runs with the test's name, its rank and
// their number as arguments, prints its address, and reads the addresses of the others. All later output belongs to the
// test.
std::vector<std::unique_ptr<ChildProcess>> StartProcesses(const std::string& program, const std::string& test,
                                                          int64_t count, const std::string& option = "");

// Child side of StartProcesses.
void MeetOthers(int64_t rank, int64_t count);
std::vector<int64_t> ProcessesUpTo(int64_t count);  // 0, 1, ...

using ProcessPart = void (*)(int64_t rank, int64_t count);
using ProcessParts = std::map<std::string, ProcessPart>;

// Runs the part of a child, with the program's arguments: its name, the rank and the number of processes.
int RunProcess(char** argv, const ProcessParts& parts);
// Runs a part in `count` processes.
void ExpectAllSucceed(const std::string& program, const std::string& part, int64_t count);

}  // namespace moe_lb::testing
