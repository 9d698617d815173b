// Decides who writes what. These are pure functions: they take local plans and return assignments.
// They neither communicate nor touch files, so a plan for 16,384 ranks is tested in one process.
//
// A *chunk* is one box of one tensor. Ranks that list the same (key, box) hold replicas of it, and
// one of them, the owner, writes it. There are two ways to choose the owners:
//  - By rule. A chunk that names its holders belongs to a set of chunks with the same holders. All
//    of those ranks know the whole set. Each of them sorts it by (-bytes, key, box) and gives each
//    chunk to the least-loaded holder. Ties go to the first in a rotation of the holders by rank,
//    whose start depends only on the holders. So every rank computes the same result without
//    communication.
//  - By exchange. Chunks that name their holders are assigned as above, if exactly those ranks list
//    them; otherwise they count as chunks without holders. A chunk that only one rank lists goes to
//    that rank. The remaining chunks, in the same order over all ranks, go to the least-loaded rank
//    that lists them, including the load that it has already.
// There is one exception to both: a small chunk whose contents the ranks compare (contents.h) goes
// to the lowest rank that has it. Empty boxes are not written. The exception is a tensor without
// elements: the lowest rank that lists it writes one empty chunk, so that the checkpoint contains
// the tensor.
//
// A *copy* is a second instance of a chunk, in the data file of a rank that holds the chunk but
// does not own it, so that this rank need not read the owner's file. A rank copies a chunk that it
// holds if the owner is in the rank's replicate group. If the holders of a chunk are unknown, a
// rank only learns the owner by exchange; by rule it copies the chunk if PlanChunk::near_main is
// set. A rank with a group also copies objects that it holds with the same content as the writer.
// By exchange: common objects whatever the group, because one rank writes them for all ranks, and
// other objects if their writer is in the group. By rule, a rank knows neither the writer of an
// object nor its content, so it copies every object that it holds and does not write. Whether a
// copy has the same content is then determined when the receipts are merged.
//
// By exchange, copies count as load: if any rank has a group, all chunks are assigned as if their
// holders were unknown. The chunk goes to the group whose most loaded holder has the least, and in
// that group to the holder that owns the least. Then no rank reads much more than the mean when
// each rank reads its own file.
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
  bool common = false;            // see TensorItem::common
  bool unknown_replicas = false;  // see ShardedTensor
  uint64_t content = 0;           // elements_hash() of its elements; 0: not compared (contents.h)
  // A replica whose id has Megatron's three numbers (pipeline, tensor, data parallel) and differs
  // from the main replica's, but not in the last one: the main replica is in the model-parallel
  // group of this rank. Not encoded.
  bool near_main = false;
};

struct PlanObject {
  std::string key;
  bool common = false;
  bool main_replica = true;
  uint64_t content = 0;  // content_hash of its value; 0: not compared
  uint64_t bytes = 0;    // size of its item, set only if copies are limited; not encoded
};

// A tensor's box or an object whose content is not the same on all ranks that have it.
struct DifferingContent {
  std::string key;
  int saved = 0;            // the rank whose version is saved
  std::vector<int> others;  // ranks with another one, ascending
  bool contested = false;   // ranks hold it although its declared holders exclude them (contents.h)
};

// A chunk that ranks hold although its declared holders exclude them.
struct ContestedChunk {
  struct Holder {
    int rank = 0;
    uint32_t chunk = 0;  // index into the rank's plan
  };
  std::vector<Holder> holders;  // of each set of declared holders, the lowest rank
};

struct ContentGroups;  // contents.h

// What one rank holds. Chunks are in the order of Items::tensors and their pieces, objects in the
// order of Items::objects.
struct LocalSavePlan {
  std::vector<PlanTensor> tensors;
  std::vector<PlanChunk> chunks;
  std::vector<PlanObject> objects;
  std::vector<std::vector<int>> holder_sets;

  Bytes encode() const;                         // for the exchange between ranks
  static LocalSavePlan decode(ByteView bytes);  // throws Error(kCorrupt)
};

// Throws Error(kInvalidArgument), naming the key, if a box lies outside its tensor, if two of this
// rank's boxes of a key overlap, if a key has two dtypes or shapes, or if it is used for a tensor
// and an object.
LocalSavePlan make_local_plan(const Items& items);

// What one rank writes: ascending indices into its local plan's chunks and objects.
struct Assignment {
  std::vector<uint32_t> chunks;
  std::vector<uint32_t> objects;
  std::vector<uint32_t> copies = {};         // chunks that another rank of its group owns
  std::vector<uint32_t> object_copies = {};  // objects that another rank writes

  Bytes encode() const;
  static Assignment decode(ByteView bytes);
  friend bool operator==(const Assignment&, const Assignment&) = default;
};

// Returns the replicate group of `rank`, ascending. Throws Error(kInvalidArgument), naming the
// rank, if it is not in the group, or if the group contains a rank outside the world or the same
// rank twice.
std::vector<int> checked_group(int rank, int world_size, std::vector<int> group);

// Collects the plans of all ranks, in any order, and assigns. Keeps its own compact copy of what it
// needs: 24 bytes for each chunk of each rank, in vectors that may have up to twice that capacity.
// Takes n log n time in the number of these chunks.
class SavePlanner {
 public:
  explicit SavePlanner(int world_size);
  ~SavePlanner();

  // Call once for each rank with its LocalSavePlan::encode(); throws Error(kInvalidArgument)
  // otherwise, and Error(kCorrupt) for other bytes. Throws, naming key and both ranks: kMismatch if
  // two ranks disagree on a key's dtype or global shape, or on whether it is a tensor or an object;
  // kInvalidArgument if an object has several main replicas.
  void add_encoded(int rank, ByteView plan);
  // Sets the ranks whose chunks `rank` copies if it holds them too. Without this call it copies
  // nothing. Call before adding the rank. Throws what checked_group() throws.
  void set_group(int rank, const std::vector<int>& group);

  // Validates the plans of all ranks together and assigns. Call once. Throws, naming key, box and
  // both ranks:
  //  kCoverage - two ranks' boxes overlap without being equal, or no rank holds some elements;
  //  kInvalidArgument - a rank was not added, or an object has no main replica.
  std::vector<Assignment> finish();

  // What follows is valid after finish().
  //
  // Where the ranks' contents differ, by key, among those that they have sent.
  const std::vector<DifferingContent>& differing() const;
  // Chunks whose contents must be compared too, because ranks contest them.
  const std::vector<ContestedChunk>& contested() const;
  // By rank: with whom it compares what. Call once, and only if note_groups() was called before any
  // rank was added.
  void note_groups();
  std::vector<ContentGroups> content_groups();

 private:
  struct State;
  void begin(int rank);
  void end();
  std::unique_ptr<State> state_;
};

// All of the above in one call: plans[r] is rank r's plan.
std::vector<Assignment> plan_save(std::span<const LocalSavePlan> plans);

// What a rank writes in a world of one rank: all that it holds. Throws what SavePlanner::finish()
// throws.
Assignment plan_save_alone(const LocalSavePlan& plan);

// What `rank` writes, by rule. Chunks with known holders are balanced among these; other chunks and
// objects are written by their main replica, and common objects by rank 0. The cost does not depend
// on the size of the world. Validation over all ranks is left to the commit, which sees all
// receipts. group: the ranks whose chunks it copies, ascending; empty: it copies nothing.
// group_is_world: these are all ranks, so that the unknown writer of any replica is one of them.
// Throws Error(kInvalidArgument) if a chunk's holders do not include `rank`.
Assignment plan_save_by_rule(const LocalSavePlan& plan, int rank, std::span<const int> group = {},
                             bool group_is_world = false);

// Removes copies from a rank's assignment until the rest fits max_bytes. The smallest copies stay:
// each copy saves one read from another rank's file, so this saves the most reads. Among copies of
// equal size, objects come before chunks, and then the lower key and box first. Returns the bytes
// of the remaining copies.
uint64_t limit_copies(const LocalSavePlan& plan, uint64_t max_bytes, Assignment& assignment);

}  // namespace tilestone
