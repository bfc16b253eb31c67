#include "ffi/testing/cuda/processes.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>

#include "ffi/common/testing.h"
#include "ffi/testing/cuda/memory.h"
#include "ffi/testing/cuda/stand_in.h"
#include "ffi/transport/neighbours_cuda.h"

namespace moe_lb::testing {

ChildProcess::ChildProcess(const std::string& program, const std::vector<std::string>& arguments) {
  int in[2], out[2];
  // Closed in later children, so that the end of a process is detected.
  EXPECT(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
  std::vector<char*> words = {const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) words.push_back(const_cast<char*>(argument.c_str()));
  words.push_back(nullptr);
  id_ = fork();
  EXPECT(id_ >= 0);
  if (id_ == 0) {
    dup2(in[0], 0);
    dup2(out[1], 1);
    execv(program.c_str(), words.data());
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  to_ = fdopen(in[1], "w");
  from_ = fdopen(out[0], "r");
}

ChildProcess::~ChildProcess() {
  Kill();
  static_cast<void>(Succeeded());
  std::fclose(to_);
  std::fclose(from_);
}

void ChildProcess::WriteLine(const std::string& line) {
  std::fputs((line + "\n").c_str(), to_);
  std::fflush(to_);
}

std::string ChildProcess::ReadLine() {
  char line[1024] = {};
  if (std::fgets(line, sizeof line, from_) == nullptr) return "";
  std::string read = line;
  if (!read.empty() && read.back() == '\n') read.pop_back();
  return read;
}

void ChildProcess::Kill() { Signal(SIGKILL); }

void ChildProcess::Signal(int signal) {
  if (id_ > 0) kill(id_, signal);
}

bool ChildProcess::Succeeded() {
  if (id_ <= 0) return false;
  int status = 0;
  waitpid(id_, &status, 0);
  id_ = -1;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::vector<std::unique_ptr<ChildProcess>> StartProcesses(const std::string& program, const std::string& test,
                                                          int64_t count, const std::string& option) {
  std::vector<std::unique_ptr<ChildProcess>> children;
  for (int64_t rank = 0; rank < count; ++rank) {
    const std::vector<std::string> arguments = {test, std::to_string(rank), std::to_string(count), option};
    children.push_back(std::make_unique<ChildProcess>(program, arguments));
  }
  std::vector<std::string> addresses;
  for (const auto& child : children) addresses.push_back(child->ReadLine());
  for (const auto& child : children) {
    for (const std::string& address : addresses) child->WriteLine(address);
  }
  return children;
}

void MeetOthers(int64_t rank, int64_t count) {
  std::string address;
  EXPECT(!Neighbours::OfProcess().Listen(&address));
  std::cout << address << std::endl;
  std::map<int64_t, std::string> addresses;
  for (int64_t other = 0; other < count; ++other) std::getline(std::cin, addresses[other]);
  const Status bad = Neighbours::OfProcess().Connect(rank, addresses, 30);
  EXPECT_EQ(bad.value_or(""), std::string());
}

std::vector<int64_t> ProcessesUpTo(int64_t count) {
  std::vector<int64_t> processes;
  for (int64_t process = 0; process < count; ++process) processes.push_back(process);
  return processes;
}

int RunProcess(char** argv, const ProcessParts& parts) {
  // A hang is a failure too.
  alarm(120);
  const int64_t rank = std::stoll(argv[2]), count = std::stoll(argv[3]);
  MeetOthers(rank, count);
  parts.at(argv[1])(rank, count);
  for (const std::string& violation : Violations()) EXPECT_EQ(violation, std::string());
  EXPECT_EQ(NumHandles(), 0);
  // Other processes may still read this process's page.
  std::cout << "done" << std::endl;
  return 0;
}

void ExpectAllSucceed(const std::string& program, const std::string& part, int64_t count) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  for (const auto& child : StartProcesses(program, part, count)) EXPECT(child->Succeeded());
  std::cerr << part << " " << count << ": " << std::chrono::duration<double>(Clock::now() - begin).count() << " s"
            << std::endl;
}

}  // namespace moe_lb::testing
