#include "ffi/planning/serving.h"

#include <algorithm>

namespace moe_lb {

Serving::Serving(View<const int32_t> tokens, size_t num_ranks)
    : all_tokens_(tokens),
      home_experts_(tokens.size() / num_ranks),
      load_(num_ranks),
      first_of_expert_(tokens.size()),
      last_of_expert_(tokens.size()),
      first_of_rank_(num_ranks),
      last_of_rank_(num_ranks),
      rank_seen_(num_ranks, 0),
      expert_seen_(tokens.size(), 0),
      taken_(num_ranks),
      given_(num_ranks) {
  const size_t entries = 2 * tokens.size() + num_ranks;  // as many as Chain ever makes
  for (auto* column : {&rank_, &expert_, &next_of_expert_, &next_of_rank_}) column->reserve(entries);
  tokens_.reserve(entries);
  removed_.reserve(entries);
  queue_.reserve(num_ranks);
  for (uint32_t expert = 0; expert < tokens.size(); ++expert) {
    rank_.push_back(static_cast<uint32_t>(expert / home_experts_));
    expert_.push_back(expert);
  }
  Reset();
}

void Serving::Reset() {
  const size_t experts = num_experts();
  // Vectors keep their memory, because Chain fills one plan after the other.
  num_replicas_ = 0;
  tokens_.assign(all_tokens_.begin(), all_tokens_.end());
  rank_.resize(experts);
  expert_.resize(experts);
  removed_.assign(experts, 0);
  next_of_expert_.assign(experts, kNone);
  next_of_rank_.assign(experts, kNone);
  std::fill(first_of_expert_.begin(), first_of_expert_.end(), kNone);
  std::fill(first_of_rank_.begin(), first_of_rank_.end(), kNone);
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    const int32_t* first = all_tokens_.begin() + rank * home_experts_;
    int32_t sum = 0;
    for (size_t i = 0; i < home_experts_; ++i) sum += first[i];
    load_[rank] = sum;
  }
}

int32_t Serving::MaxLoad() const { return *std::max_element(load_.begin(), load_.end()); }

void Serving::Add(uint32_t expert, uint32_t rank, int32_t tokens) {
  const uint32_t entry = num_entries();
  tokens_.push_back(tokens);
  rank_.push_back(rank);
  expert_.push_back(expert);
  removed_.push_back(0);
  next_of_expert_.push_back(kNone);
  next_of_rank_.push_back(kNone);
  Link(entry);
  ++num_replicas_;
  tokens_[expert] -= tokens;
  load_[rank_[expert]] -= tokens;
  load_[rank] += tokens;
}

void Serving::Link(uint32_t entry) {
  const uint32_t expert = expert_[entry];
  const uint32_t rank = rank_[entry];
  // Append to the lists, so that searches visit replicas in the order of addition, and the plan is deterministic.
  (first_of_expert_[expert] == kNone ? first_of_expert_[expert] : next_of_expert_[last_of_expert_[expert]]) = entry;
  (first_of_rank_[rank] == kNone ? first_of_rank_[rank] : next_of_rank_[last_of_rank_[rank]]) = entry;
  last_of_expert_[expert] = entry;
  last_of_rank_[rank] = entry;
}

std::vector<Replica> Serving::Replicas() const {
  std::vector<Replica> replicas;
  for (auto entry = static_cast<uint32_t>(num_experts()); entry < num_entries(); ++entry) {
    if (removed_[entry] == 0) replicas.push_back({expert_[entry], rank_[entry]});
  }
  return replicas;
}

void Serving::MoveReplica(uint32_t entry, uint32_t to) {
  // The lists of slots by rank keep the old entry, so searches are invalid afterwards.
  load_[rank_[entry]] -= tokens_[entry];
  load_[to] += tokens_[entry];
  rank_[entry] = to;
}

void Serving::Remove(uint32_t entry) {
  const uint32_t home = expert_[entry];
  // Home may be above the limit afterwards; the caller offloads it.
  const int32_t tokens = tokens_[entry];
  tokens_[home] += tokens;
  load_[rank_[home]] += tokens;
  load_[rank_[entry]] -= tokens;
  tokens_[entry] = 0;
  removed_[entry] = 1;
  --num_replicas_;
}

uint32_t Serving::Find(uint32_t expert, uint32_t rank) const {
  uint32_t entry = first_of_expert_[expert];
  // The end of the list is not checked: the caller guarantees that the rank holds the expert.
  while (rank_[entry] != rank || removed_[entry] != 0) entry = next_of_expert_[entry];
  return entry;
}

void Serving::Save(Amounts* amounts) const {
  amounts->tokens = tokens_;
  amounts->load = load_;
}

void Serving::Restore(const Amounts& amounts, uint32_t removed) {
  // A removed entry is only marked and stays in its lists, so clearing the mark restores it.
  tokens_ = amounts.tokens;
  load_ = amounts.load;
  removed_[removed] = 0;
  ++num_replicas_;
}

int32_t Serving::Level(int32_t limit) {
  for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
    while (!OffloadRank(rank, limit)) {
      int64_t sum = 0;
      for (const uint32_t reached : queue_) sum += load_[reached];
      const auto count = static_cast<int64_t>(queue_.size());
      // The tokens of these ranks can be served nowhere else, so one of them has at least the mean load, rounded up,
      // and no quota of these replicas keeps a lower limit. Ranks offloaded before stay below, because the limit only
      // rises.
      limit = static_cast<int32_t>((sum + count - 1) / count);
    }
  }
  return limit;
}

bool Serving::OffloadRank(uint32_t rank, int32_t limit) {
  while (load_[rank] > limit) {
    // A new search number invalidates all earlier marks without clearing them.
    ++search_;
    queue_.assign(1, rank);
    rank_seen_[rank] = search_;
    size_t next = 0;
    while (next < queue_.size() && !Visit(queue_[next], limit)) ++next;
    if (next == queue_.size()) return false;
    // Stop at the first rank with room, so that the path is a shortest one and few shares change.
    Push(rank, queue_.back(), limit);
  }
  return true;
}

// Home experts first, then replicas in the order of addition; of each expert its home, then its replicas.
bool Serving::Visit(uint32_t from, int32_t limit) {
  const auto first_home = static_cast<uint32_t>(from * home_experts_);
  const auto end_home = static_cast<uint32_t>(first_home + home_experts_);
  const auto spread = [&](uint32_t entry) {
    const uint32_t expert = expert_[entry];
    // One rank with tokens of an expert reaches all its holders, so an expert is expanded once per search.
    if (tokens_[entry] == 0 || expert_seen_[expert] == search_) return false;
    expert_seen_[expert] = search_;
    if (Reach(entry, expert, limit)) return true;
    for (uint32_t to = first_of_expert_[expert]; to != kNone; to = next_of_expert_[to]) {
      if (removed_[to] == 0 && Reach(entry, to, limit)) return true;
    }
    return false;
  };
  for (uint32_t expert = first_home; expert < end_home; ++expert) {
    // Tokens of experts without replicas, the majority, cannot move.
    if (first_of_expert_[expert] != kNone && spread(expert)) return true;
  }
  for (uint32_t entry = first_of_rank_[from]; entry != kNone; entry = next_of_rank_[entry]) {
    if (spread(entry)) return true;
  }
  return false;
}

bool Serving::Reach(uint32_t from, uint32_t to, int32_t limit) {
  const uint32_t rank = rank_[to];
  if (rank_seen_[rank] == search_) return false;
  rank_seen_[rank] = search_;
  taken_[rank] = from;
  given_[rank] = to;
  queue_.push_back(rank);
  return load_[rank] < limit;
}

void Serving::Push(uint32_t source, uint32_t sink, int32_t limit) {
  // At most the smallest share on the path may pass, or a share would become negative.
  int32_t tokens = std::min(load_[source] - limit, limit - load_[sink]);
  for (uint32_t rank = sink; rank != source; rank = rank_[taken_[rank]]) {
    tokens = std::min(tokens, tokens_[taken_[rank]]);
  }
  for (uint32_t rank = sink; rank != source; rank = rank_[taken_[rank]]) {
    tokens_[taken_[rank]] -= tokens;
    tokens_[given_[rank]] += tokens;
  }
  load_[source] -= tokens;
  load_[sink] += tokens;
}

}  // namespace moe_lb
