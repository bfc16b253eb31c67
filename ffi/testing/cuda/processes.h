// Processes of a test: this program, run again, as often as there are ranks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace moe_lb::testing {

// What the test does with one of them. It is killed, if it still runs, and forgotten at the end.
class ChildProcess {
 public:
  ChildProcess(const std::string& program, const std::vector<std::string>& arguments);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void WriteLine(const std::string& line);
  std::string ReadLine();  // without its end; empty where there is none any more
  void Kill();
  bool Succeeded();  // after its end

 private:
  pid_t id_ = -1;
  FILE* to_ = nullptr;
  FILE* from_ = nullptr;
};

// Starts a process per rank and lets them know each other, as jax.distributed would: each is called with the test's
// name, its rank and their number, says where it listens, and hears where the others do. What it writes after that is
// the test's.
std::vector<std::unique_ptr<ChildProcess>> StartProcesses(const std::string& program, const std::string& test,
                                                          int64_t count, const std::string& option = "");

// In such a process.
void MeetOthers(int64_t rank, int64_t count);
std::vector<int64_t> ProcessesUpTo(int64_t count);  // 0, 1, ...

}  // namespace moe_lb::testing
