#include "ffi/transport/neighbours_cuda.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <vector>

namespace moe_lb {
namespace {

// Time limit for the hello of a new connection.
constexpr int kHelloMs = 5000;

Received WaitForNote(const Descriptor& socket, PeerNote* note, Descriptor* descriptor) {
  pollfd one = {socket.get(), POLLIN, 0};
  if (poll(&one, 1, kHelloMs) <= 0) return Received::kEmpty;
  return ReceiveNote(socket, note, descriptor);
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
    listening_ = std::move(socket);
    std::thread([this] { Watch(); }).detach();
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
    Status bad = ConnectLocally(address, &socket);
    if (!bad) bad = SendNote(socket, hello, -1);
    if (bad) return At("connection with process " + std::to_string(process), *bad);
    AddLink(process, std::move(socket));
  }
  std::unique_lock<std::mutex> lock(mutex_);
  for (const auto& [process, address] : addresses) {
    const auto is_linked = [&, number = process] { return number == own || links_.count(number) > 0; };
    if (changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), is_linked)) continue;
    return Problem("process " + std::to_string(process) + " did not connect within " + std::to_string(timeout_s) + " s",
                   true);
  }
  return Ok();
}

Status Neighbours::Send(int64_t process, const PeerNote& note, int descriptor) {
  const std::shared_ptr<Link> link = Find(process);
  if (link == nullptr) return Refuse("process ", process, " is not connected with this one");
  ++num_sent_;
  // Sockets preserve message boundaries between threads.
  // A process may send before its watching thread has seen the end of the other one.
  const Status bad = SendNote(link->socket, note, descriptor);
  return bad ? At("process " + std::to_string(process), *bad) : Ok();
}

bool Neighbours::Take(int64_t process, PeerNote::Kind kind, uint64_t id, PeerNote* note, Descriptor* descriptor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = notes_.find({process, {kind, id}});
  if (found == notes_.end()) return false;
  *note = found->second.first;
  *descriptor = std::move(found->second.second);
  notes_.erase(found);
  return true;
}

bool Neighbours::IsGone(int64_t process) const {
  const std::shared_ptr<Link> link = Find(process);
  const std::lock_guard<std::mutex> lock(mutex_);
  return process != own_ && (link == nullptr || !link->is_open);
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
        if (!link->is_open) continue;
        links.emplace_back(process, link);
        watched.push_back({link->socket.get(), POLLIN, 0});
      }
    }
    if (poll(watched.data(), watched.size(), -1) < 0) continue;
    uint64_t woken = 0;
    static_cast<void>(!read(wake_.get(), &woken, sizeof woken));
    if (watched[0].revents != 0) Accept();
    for (size_t i = 0; i < links.size(); ++i) {
      if (watched[i + 2].revents != 0 && !Read(links[i].second, links[i].first)) End(links[i].first);
    }
  }
}

void Neighbours::Accept() {
  Descriptor socket, none;
  PeerNote hello;
  if (AcceptLocally(listening_, &socket)) return;
  if (WaitForNote(socket, &hello, &none) != Received::kNote || hello.kind != PeerNote::kHello) return;
  AddLink(hello.process, std::move(socket));
}

bool Neighbours::Read(const std::shared_ptr<Link>& link, int64_t process) {
  for (;;) {
    PeerNote note;
    Descriptor descriptor;
    switch (ReceiveNote(link->socket, &note, &descriptor)) {
      case Received::kEnd:
        return false;
      case Received::kEmpty:
        return true;
      case Received::kNote:
        const std::lock_guard<std::mutex> lock(mutex_);
        notes_.insert_or_assign({process, {note.kind, note.id}}, StoredNote(note, std::move(descriptor)));
    }
  }
}

void Neighbours::End(int64_t process) {
  std::vector<std::function<void(int64_t)>> told;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    links_.at(process)->is_open = false;
    ended_.insert(process);
    told = on_end_;
  }
  for (const auto& gone : told) gone(process);
}

}  // namespace moe_lb
