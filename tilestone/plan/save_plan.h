// Who writes what. Pure functions: local plans in, assignments out; no ranks talk, no file is
// touched, so a 16,384-rank plan is tested in one process.
//
// A *chunk* is one box of one tensor. Ranks that list the same (key, box) hold replicas of it; one
// of them, the owner, writes it. Owners:
//  - by rule: a chunk that names its holders belongs to a set of chunks with the same holders. All
//    of those ranks know the whole set, so each sorts it by (-bytes, key, box) and gives each
//    chunk to the least-loaded holder, ties to the lowest rank of a rotation that starts at a
//    place that depends on the holders alone. The result is the same on every rank, without a word.
//  - by exchange: chunks that name their holders as above, where just those ranks list them (else
//    they count as the others); chunks that one rank lists go to it; the others, in the same order
//    over all ranks, go to the least-loaded rank that lists them, counting what it has so far.
// Empty boxes are written by nobody, but for tensors without elements, whose lowest lister writes
// one empty chunk (so that the checkpoint knows the tensor).
//
// A *copy* is a chunk once more, in the data file of a rank that holds it and does not own it, so
// that this rank need not read the owner's file. A rank copies what it holds where the owner is
// among the ranks that it names (its replicate group); of chunks of unknown holders it learns the
// owner by exchange alone. Of objects a rank with a group copies those that it holds as the writer
// does, by content: common ones whatever the group, since one rank writes them for all ranks, and
// others, by exchange alone, where their writer is one of the group. By rule it does not know the
// writer's content: whether it has copied the same is found when the reports are put together.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/state/items.h"

namespace tilestone {

struct PlanTensor {
  std::string key;
  DType dtype = DType::kFloat32;
  Dims global_shape;
};

struct PlanChunk {
  static constexpr uint32_t kUnknown = ~uint32_t{0};
  uint32_t tensor = 0;          // index into LocalSavePlan::tensors
  uint32_t holders = kUnknown;  // index into LocalSavePlan::holder_sets
  bool main_replica = true;
  Box box;
  bool common = false;  // as TensorItem::common
};

struct PlanObject {
  std::string key;
  bool common = false;
  bool main_replica = true;
  uint64_t content = 0;  // content_hash of its value; 0: not known
  uint64_t bytes = 0;    // of its item, as far as copies of it are limited; not encoded
};

// A common object that is not the same on two ranks.
struct DifferingObject {
  std::string key;
  int rank = 0;
  int other = 0;
};

// What one rank holds. Chunks stand in the order of Items::tensors and their pieces, objects in
// the order of Items::objects.
struct LocalSavePlan {
  std::vector<PlanTensor> tensors;
  std::vector<PlanChunk> chunks;
  std::vector<PlanObject> objects;
  std::vector<std::vector<int>> holder_sets;

  Bytes encode() const;                         // the bytes that are exchanged
  static LocalSavePlan decode(ByteView bytes);  // Error(kCorrupt)
};

// Throws Error(kInvalidArgument) naming the key when a box lies outside its tensor, two of this
// rank's own boxes of a key overlap, a key is given with two dtypes or shapes, or is both a tensor
// and an object.
LocalSavePlan make_local_plan(const Items& items);

// What one rank writes: indices into its local plan's chunks and objects, ascending.
struct Assignment {
  std::vector<uint32_t> chunks;
  std::vector<uint32_t> objects;
  std::vector<uint32_t> copies = {};         // chunks that another rank of its group owns
  std::vector<uint32_t> object_copies = {};  // objects that another rank writes

  Bytes encode() const;
  static Assignment decode(ByteView bytes);
  friend bool operator==(const Assignment&, const Assignment&) = default;
};

// The replicate group of `rank`, ascending. Error(kInvalidArgument) naming the rank when it is not
// one of the group, or one of the group is outside the world or is named twice.
std::vector<int> checked_group(int rank, int world_size, std::vector<int> group);

// Collects every rank's plan, in any order, and assigns. Keeps its own compact copy of what it
// needs: 24 bytes for each chunk of each rank, as vectors grow up to twice that. Time n log n in
// their number.
class SavePlanner {
 public:
  explicit SavePlanner(int world_size);
  ~SavePlanner();

  // Once for each rank (Error(kInvalidArgument) otherwise). What is wrong with plans is reported by
  // finish().
  void add(int rank, const LocalSavePlan& plan);
  // The same from the plan's encoding, in a third of the time; Error(kCorrupt).
  void add_encoded(int rank, ByteView bytes);
  // The ranks whose chunks `rank` copies where it holds them too; without this it copies nothing.
  // Called before the rank is added. Errors: checked_group()'s.
  void set_group(int rank, const std::vector<int>& group);

  // Validates over all ranks and assigns; called once. Throws, naming key, box and both ranks:
  //  kMismatch - two ranks disagree on a key's dtype or global shape, or on tensor versus object;
  //  kCoverage - two ranks' boxes overlap without being equal, or elements are held by nobody;
  //  kInvalidArgument - a rank was not added, an object has no or several main replicas.
  std::vector<Assignment> finish();

  // Common objects of the plans that were added of which the contents are known and differ, by key;
  // the lowest rank's is written.
  std::vector<DifferingObject> differing_objects() const;

 private:
  struct State;
  void begin(int rank);
  void end();
  std::unique_ptr<State> state_;
};

// All of the above in one call: plans[r] is rank r's.
std::vector<Assignment> plan_save(std::span<const LocalSavePlan> plans);

// What a rank without others writes: all that it holds. Errors as SavePlanner::finish().
Assignment plan_save_alone(const LocalSavePlan& plan);

// What `rank` writes, by rule: chunks with known holders balanced among them, others by the main
// replica, common objects by rank 0, other objects by their main replica. Costs nothing that
// grows with the world's size. Validation over ranks is left to the commit (it sees all reports).
// group: the ranks whose chunks it copies, ascending; empty: it copies nothing.
// Error(kInvalidArgument) when a chunk's holders do not include `rank`.
Assignment plan_save_by_rule(const LocalSavePlan& plan, int rank, std::span<const int> group = {});

// Leaves as many of a rank's copies as max_bytes allow, in order of size, the smallest first: each
// copy saves one read of another rank's file, so this saves the most reads. Of equal ones those of
// the lower key, then box, and objects before chunks. Returns the bytes of what is left.
uint64_t limit_copies(const LocalSavePlan& plan, uint64_t max_bytes, Assignment& assignment);

}  // namespace tilestone
