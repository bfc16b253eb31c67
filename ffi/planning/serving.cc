#include "ffi/planning/serving.h"

#include <algorithm>

namespace moe_lb {

Serving::Serving(View<const int32_t> tokens, size_t num_ranks)
    : all_tokens_(tokens),
      home_experts_(tokens.size() / num_ranks),
      load_(num_ranks),
      of_expert_(tokens.size()),
      of_rank_(num_ranks),
      expert_seen_(tokens.size(), 0),
      steps_(num_ranks) {
  const size_t entries = 2 * tokens.size() + num_ranks;  // as many as Chain ever makes
  tokens_.reserve(entries);
  removed_.reserve(entries);
  entries_.reserve(entries);
  queue_.reserve(num_ranks);
  entries_.resize(tokens.size());
  uint32_t expert = 0;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t i = 0; i < home_experts_; ++i, ++expert) entries_[expert] = {rank, expert};
  }
  Reset();
}

void Serving::Reset() {
  // Vectors keep their memory, because Chain fills one plan after the other. Entries of homes do not change.
  num_replicas_ = 0;
  tokens_.assign(all_tokens_.begin(), all_tokens_.end());
  removed_.assign(num_experts(), 0);
  entries_.resize(num_experts());
  std::fill(of_expert_.begin(), of_expert_.end(), List());
  std::fill(of_rank_.begin(), of_rank_.end(), List());
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
  removed_.push_back(0);
  entries_.push_back({rank, expert});
  Link(entry);
  ++num_replicas_;
  tokens_[expert] -= tokens;
  load_[this->rank(expert)] -= tokens;
  load_[rank] += tokens;
}

void Serving::MoveTokens(uint32_t entry, int32_t tokens) {
  const uint32_t home = expert(entry);
  tokens_[home] -= tokens;
  tokens_[entry] += tokens;
  load_[rank(home)] -= tokens;
  load_[rank(entry)] += tokens;
}

void Serving::Link(uint32_t entry) {
  List& of_expert = of_expert_[expert(entry)];
  List& of_rank = of_rank_[rank(entry)];
  // Append to the lists, so that searches visit replicas in the order of addition, and the plan is deterministic.
  (of_expert.first == kNone ? of_expert.first : entries_[of_expert.last].next_of_expert) = entry;
  (of_rank.first == kNone ? of_rank.first : entries_[of_rank.last].next_of_rank) = entry;
  of_expert.last = entry;
  of_rank.last = entry;
}

std::vector<Replica> Serving::Replicas() const {
  std::vector<Replica> replicas;
  for (auto entry = static_cast<uint32_t>(num_experts()); entry < num_entries(); ++entry) {
    if (!removed(entry)) replicas.push_back({expert(entry), rank(entry)});
  }
  return replicas;
}

size_t Serving::FanOut() const {
  std::vector<size_t> sent(num_ranks(), 0);
  for (auto entry = static_cast<uint32_t>(num_experts()); entry < num_entries(); ++entry) {
    if (!removed(entry)) ++sent[expert(entry) / home_experts_];
  }
  return *std::max_element(sent.begin(), sent.end());
}

void Serving::MoveReplica(uint32_t entry, uint32_t to) {
  // The lists of slots by rank keep the old entry, so searches are invalid afterwards.
  load_[rank(entry)] -= tokens_[entry];
  load_[to] += tokens_[entry];
  entries_[entry].rank = to;
}

void Serving::Remove(uint32_t entry) {
  const uint32_t home = expert(entry);
  // Home may be above the limit afterwards; the caller offloads it.
  const int32_t tokens = tokens_[entry];
  tokens_[home] += tokens;
  load_[rank(home)] += tokens;
  load_[rank(entry)] -= tokens;
  tokens_[entry] = 0;
  removed_[entry] = 1;
  --num_replicas_;
}

uint32_t Serving::Find(uint32_t expert, uint32_t rank) const {
  uint32_t entry = of_expert_[expert].first;
  // The end of the list is not checked: the caller guarantees that the rank holds the expert.
  while (this->rank(entry) != rank || removed(entry)) entry = entries_[entry].next_of_expert;
  return entry;
}

bool Serving::Holds(uint32_t rank, uint32_t expert) const {
  if (this->rank(expert) == rank) return true;
  for (uint32_t entry = of_expert_[expert].first; entry != kNone; entry = entries_[entry].next_of_expert) {
    if (this->rank(entry) == rank && !removed(entry)) return true;
  }
  return false;
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

int32_t Serving::Level(int32_t limit, int32_t too_high) {
  for (uint32_t rank = 0; rank < num_ranks() && limit < too_high; ++rank) {
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
    steps_[rank].search = search_;
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
    const uint32_t expert = entries_[entry].expert;
    // One rank with tokens of an expert reaches all its holders, so an expert is expanded once per search.
    if (tokens_[entry] == 0 || expert_seen_[expert] == search_) return false;
    expert_seen_[expert] = search_;
    if (Reach(entry, expert, limit)) return true;
    for (uint32_t to = of_expert_[expert].first; to != kNone; to = entries_[to].next_of_expert) {
      if (!removed(to) && Reach(entry, to, limit)) return true;
    }
    return false;
  };
  for (uint32_t expert = first_home; expert < end_home; ++expert) {
    // Tokens of experts without replicas, the majority, cannot move.
    if (of_expert_[expert].first != kNone && spread(expert)) return true;
  }
  for (uint32_t entry = of_rank_[from].first; entry != kNone; entry = entries_[entry].next_of_rank) {
    if (spread(entry)) return true;
  }
  return false;
}

bool Serving::Reach(uint32_t from, uint32_t to, int32_t limit) {
  const uint32_t reached = rank(to);
  if (steps_[reached].search == search_) return false;
  steps_[reached] = {search_, from, to};
  queue_.push_back(reached);
  return load_[reached] < limit;
}

void Serving::Push(uint32_t source, uint32_t sink, int32_t limit) {
  // At most the smallest share on the path may pass, or a share would become negative.
  int32_t tokens = std::min(load_[source] - limit, limit - load_[sink]);
  for (uint32_t at = sink; at != source; at = rank(steps_[at].taken)) {
    tokens = std::min(tokens, tokens_[steps_[at].taken]);
  }
  for (uint32_t at = sink; at != source; at = rank(steps_[at].taken)) {
    tokens_[steps_[at].taken] -= tokens;
    tokens_[steps_[at].given] += tokens;
  }
  load_[source] -= tokens;
  load_[sink] += tokens;
}

}  // namespace moe_lb
