#include "ffi/transport/neighbours_cuda.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "ffi/transport/start_thread.h"

namespace moe_lb {
namespace {

// Time limit for the hello of a new connection.
constexpr double kHelloS = 5;

// After an error that may repeat at once.
constexpr std::chrono::milliseconds kPause(10);

std::string NameOf(int64_t process) { return "process " + std::to_string(process); }

// The same result with the number of the process, also in the problem.
SocketResult Of(int64_t process, SocketResult result) {
  result.process = process;
  if (result.problem) result.problem = At(NameOf(process), *result.problem);
  return result;
}

}  // namespace

Neighbours& Neighbours::OfProcess() {
  static auto* const neighbours = new Neighbours;
  return *neighbours;
}

Status Neighbours::Listen(std::string* address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!listening_) {
    Descriptor socket;
    if (Status bad = ListenLocally(&socket, &address_)) return bad;
    wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) return OutcomeOf("eventfd", errno).problem;
    listening_ = std::move(socket);
    if (Status bad = StartThread([this] { std::thread([this] { Watch(); }).detach(); })) {
      // The next call tries again.
      listening_ = Descriptor();
      return bad;
    }
  }
  *address = address_;
  return Ok();
}

Status Neighbours::Connect(int64_t own, const std::map<int64_t, std::string>& addresses, double timeout_s) {
  int64_t before = -1;
  if (!own_.compare_exchange_strong(before, own) && before != own) {
    return Refuse("this is process ", own, ", and was process ", before, " before; expected the same number");
  }
  for (const auto& [process, address] : addresses) {
    // Of two processes, the one with the larger number connects.
    if (process >= own || Find(process) != nullptr) continue;
    Descriptor socket;
    PeerNote hello;
    hello.process = static_cast<uint32_t>(own);
    SocketResult one = Repeat(timeout_s, [&, &to = address] { return ConnectLocally(to, &socket); });
    if (!one.problem) one = Repeat(timeout_s, [&] { return SendNote(socket, hello, -1); });
    if (one.problem) return At("connection with " + NameOf(process), *one.problem);
    AddLink(process, std::move(socket));
  }
  std::unique_lock<std::mutex> lock(mutex_);
  for (const auto& [process, address] : addresses) {
    const auto is_linked = [&, number = process] { return number == own || links_.count(number) > 0; };
    if (changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), is_linked)) continue;
    const std::string why = not_accepted_ ? ": " + *not_accepted_ : "";
    return Problem(NameOf(process) + " did not connect within " + std::to_string(timeout_s) + " s" + why, true);
  }
  return Ok();
}

SocketResult Neighbours::Send(int64_t process, const PeerNote& note, int descriptor, double timeout_s) {
  const std::shared_ptr<Link> link = Find(process);
  if (link == nullptr) return WhyGone(process);
  ++num_sent_;
  // Sockets preserve message boundaries between threads.
  // A process may send before its watching thread has seen the end of the other one.
  SocketResult sent = Repeat(timeout_s, [&] { return SendNote(link->socket, note, descriptor); });
  if (sent.outcome == SocketOutcome::kStalled) {
    sent.problem = Refuse("it has not read its messages for ", timeout_s, " s; expected all processes to run");
  }
  return Of(process, std::move(sent));
}

bool Neighbours::Take(int64_t process, PeerNote::Kind kind, uint64_t id, PeerNote* note, Descriptor* descriptor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = notes_.lower_bound({process, {kind, id}});
  if (found == notes_.end() || found->first != Key(process, {kind, id})) return false;
  *note = found->second.first;
  *descriptor = std::move(found->second.second);
  notes_.erase(found);
  return true;
}

Status Neighbours::Await(int64_t process, PeerNote::Kind kind, uint64_t id, double timeout_s, const char* missing,
                         PeerNote* note, Descriptor* descriptor) {
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    // Test for the end first: a process may end after it has sent the note.
    const SocketResult gone = WhyGone(process);
    if (Take(process, kind, id, note, descriptor)) return Ok();
    if (gone.problem) return gone.problem;
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > timeout_s) {
      return Problem(NameOf(process) + " has named " + missing, true);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

SocketResult Neighbours::WhyGone(int64_t process) const {
  if (process == own_) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = links_.find(process);
  if (found != links_.end()) return found->second->end;
  return {SocketOutcome::kBroken, Refuse(NameOf(process), " is not connected with this one"), process};
}

void Neighbours::OnEnd(std::function<void(int64_t)> gone) {
  std::set<int64_t> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended = ended_;
    on_end_.push_back(gone);
  }
  // A process ending now may be reported twice, which has no effect.
  for (const int64_t process : ended) gone(process);
}

std::shared_ptr<Neighbours::Link> Neighbours::Find(int64_t process) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = links_.find(process);
  return found == links_.end() ? nullptr : found->second;
}

void Neighbours::AddLink(int64_t process, Descriptor socket) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto link = std::make_shared<Link>();
    link->socket = std::move(socket);
    links_.emplace(process, link);
  }
  changed_.notify_all();
  Wake();
}

void Neighbours::Wake() {
  const uint64_t one = 1;
  // A full counter wakes the thread too.
  static_cast<void>(!write(wake_.get(), &one, sizeof one));
}

// ---- the watching thread -----------------------------------------------------------

void Neighbours::Watch() {
  for (;;) {
    std::vector<std::pair<int64_t, std::shared_ptr<Link>>> links;
    std::vector<pollfd> watched = {{listening_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [process, link] : links_) {
        if (link->end.outcome == SocketOutcome::kEnded) continue;
        links.emplace_back(process, link);
        watched.push_back({link->socket.get(), POLLIN, 0});
      }
    }
    if (poll(watched.data(), watched.size(), -1) < 0) continue;
    uint64_t woken = 0;
    static_cast<void>(!read(wake_.get(), &woken, sizeof woken));
    if (watched[0].revents != 0) Accept();
    for (size_t i = 0; i < links.size(); ++i) {
      if (watched[i + 2].revents == 0) continue;
      const auto& [process, link] = links[i];
      End(process, Read(*link, process));
    }
  }
}

void Neighbours::Accept() {
  Descriptor socket, none;
  PeerNote hello;
  SocketResult one = AcceptLocally(listening_, &socket);
  if (!one.problem) one = Repeat(kHelloS, [&] { return ReceiveNote(socket, &hello, &none); });
  if (!one.problem && hello.kind == PeerNote::kHello) return AddLink(hello.process, std::move(socket));
  if (one.outcome != SocketOutcome::kBroken) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    not_accepted_ = one.problem;
  }
  // Without descriptors the connection stays in the queue, and would wake this thread at once.
  std::this_thread::sleep_for(kPause);
}

SocketResult Neighbours::Read(const Link& link, int64_t process) {
  for (;;) {
    PeerNote note;
    Descriptor descriptor;
    SocketResult received = ReceiveNote(link.socket, &note, &descriptor);
    if (received.problem) return Of(process, std::move(received));
    const std::lock_guard<std::mutex> lock(mutex_);
    // The descriptor of memory that was never mapped would keep it allocated.
    const auto unused = notes_.find({process, {PeerNote::kMemory, note.id}});
    if (note.kind == PeerNote::kGone && unused != notes_.end()) {
      notes_.erase(unused);
    } else {
      notes_.emplace(Key(process, {note.kind, note.id}), StoredNote(note, std::move(descriptor)));
    }
  }
}

void Neighbours::End(int64_t process, SocketResult end) {
  if (end.outcome == SocketOutcome::kStalled) return;
  const bool has_ended = end.outcome == SocketOutcome::kEnded;
  std::vector<std::function<void(int64_t)>> told;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    links_.at(process)->end = std::move(end);
    if (has_ended) ended_.insert(process);
    if (has_ended) told = on_end_;
  }
  // A process behind a broken connection still runs: its end is awaited.
  if (!has_ended) std::this_thread::sleep_for(kPause);
  for (const auto& gone : told) gone(process);
}

}  // namespace moe_lb
