// Faults of the system calls of sockets in this process: sendmsg, recvmsg, accept4 and connect.
#pragma once

#include <cstdint>
#include <string>

namespace moe_lb::testing {

// Fails `count` calls of `function` with `error` after `after` more successful ones; an empty name: no calls.
void FailSocketCalls(const std::string& function, int64_t after, int error, int64_t count = 1);

// Ends this process by SIGKILL instead of the call of `function` after `after` more.
void DieAtSocketCall(const std::string& function, int64_t after);

// Calls of `function` so far, failed ones included.
int64_t NumSocketCalls(const std::string& function);

}  // namespace moe_lb::testing
