// SPDX-License-Identifier: Apache-2.0
// The class cuattn._core.BlockPool: the C functions of the block pool with lists of ids and numpy
// arrays of tokens; and cuattn._core.HeldBlocks, the blocks of one sequence of PagedKVCache. The
// interpreter lock is kept: the calls are short, and each is one step for every Python thread.
// Next: python/cuattn/block_pool.py, python/cuattn/paged_kv_cache.py.
#include "bindings/block_pool.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/arrays/import.h"
#include "bindings/call/errors.h"
#include "bindings/call/parse.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {
namespace {

std::vector<int32_t> parse_ids(const char* op, nb::handle ids) {
  PyObject* iterator = PyObject_GetIter(ids.ptr());
  if (iterator == nullptr) {
    PyErr_Clear();
    raise(PyExc_TypeError, op, ": ids must be a sequence of integers, got ", text_of(nb::repr(ids)),
          "; pass a list of blocks");
  }
  Py_DECREF(iterator);
  std::vector<int32_t> list;
  for (nb::handle id : ids) list.push_back(parse_int32(op, "ids", id));
  return list;
}

nb::list list_of(const std::vector<int32_t>& ids) {
  nb::list list;
  for (int32_t id : ids) list.append(id);
  return list;
}

// int64 [num_tokens], contiguous, as python/cuattn/block_pool.py makes it.
struct Tokens {
  Array array;

  Tokens(const char* op, nb::handle source) {
    array.import(op, "tokens", source, {}, nullptr);
    const DLDataType& dtype = array.view.dtype;
    if (array.view.ndim != 1 || dtype.code != kDLInt || dtype.bits != 64 ||
        (array.view.shape[0] > 1 && array.view.strides[0] != 1)) {
      raise(PyExc_TypeError, op, ": tokens must be a contiguous int64 array of one axis");
    }
  }
  const int64_t* data() const { return static_cast<const int64_t*>(array.view.data); }
  int64_t count() const { return array.view.shape[0]; }
};

// The salt as bytes or None, as python/cuattn/block_pool.py makes it; borrowed.
struct Prefix {
  cuattn_prefix_options options;

  explicit Prefix(nb::handle salt) {
    cuattn_prefix_options_init(&options, sizeof options);
    if (salt.is_none()) return;
    nb::bytes bytes = nb::cast<nb::bytes>(salt);
    options.salt = bytes.data();
    options.salt_bytes = static_cast<int64_t>(bytes.size());
  }
};

using Pool = std::shared_ptr<cuattn_block_pool>;

// References to blocks, in the order of a sequence, and what Python says of that sequence. They go
// with the object: what is dropped half way, by whatever exception, gives back what it took. And
// `replace` changes both in one call, before or after which an interrupt may come, but not within.
class HeldBlocks {
 public:
  explicit HeldBlocks(Pool pool) : pool_(std::move(pool)) {}
  HeldBlocks(HeldBlocks&&) = default;
  ~HeldBlocks() { clear(); }

  void clear() {
    if (!ids_.empty()) cuattn_block_pool_free(pool_.get(), ids_.data(), ids_.size());
    ids_.clear();
  }

  void allocate(int64_t count, int64_t num_blocks) {
    size_t held = ids_.size();
    ids_.resize(held + std::clamp<int64_t>(count, 0, num_blocks));
    cuattn_status status = cuattn_block_pool_allocate(pool_.get(), count, ids_.data() + held);
    if (status != CUATTN_OK) ids_.resize(held);
    check(status);
  }

  void match_prefix(const Tokens& tokens, const Prefix& prefix, int64_t block_size) {
    ids_.resize(tokens.count() / block_size);
    int64_t matched = 0;
    cuattn_status status = cuattn_block_pool_match_prefix(
        pool_.get(), tokens.data(), tokens.count(), &prefix.options, ids_.data(), &matched);
    ids_.resize(matched);
    check(status);
  }

  // A list in which the references live on: the caller frees them.
  nb::list release() {
    nb::list list = list_of(ids_);
    ids_.clear();
    return list;
  }

  // ---- What PagedKVCache asks

  int64_t count() const { return ids_.size(); }

  nb::list ids(int64_t first) const { return list_of({ids_.begin() + first, ids_.end()}); }

  HeldBlocks fork() const {
    HeldBlocks other(pool_);
    other.ids_.reserve(ids_.size());
    check(cuattn_block_pool_fork(pool_.get(), ids_.data(), ids_.size()));
    other.ids_ = ids_;
    return other;
  }

  // Takes `count` blocks to go on with. If the last one here will be written, no one finds it from
  // then on; if others hold it too, one more block comes first in the result, to be put in its
  // place once it is copied. Too few free blocks for all of that change nothing.
  HeldBlocks grow(int64_t count, bool writes_last) const {
    HeldBlocks fresh(pool_);
    int64_t references = 0;
    if (writes_last) check(cuattn_block_pool_ref_count(pool_.get(), ids_.back(), &references));
    if (references > 1) {
      cuattn_block_pool_stats stats;
      check(cuattn_block_pool_get_stats(pool_.get(), &stats));
      if (stats.free_blocks <= count) {
        raise(out_of_blocks_error, "BlockPool.allocate: ", count + 1, " blocks must be free, got ",
              stats.free_blocks);
      }
      // make_writable moves a reference of `last` to the copy: one that is added here.
      int32_t last = ids_.back();
      fresh.ids_.reserve(count + 1);
      check(cuattn_block_pool_fork(pool_.get(), &last, 1));
      fresh.ids_.push_back(last);
      check(cuattn_block_pool_make_writable(pool_.get(), last, fresh.ids_.data()));
    }
    if (count > 0) fresh.allocate(count, count);
    if (references == 1) {
      int32_t last;
      check(cuattn_block_pool_make_writable(pool_.get(), ids_.back(), &last));
    }
    return fresh;
  }

  // Keeps the first `keep` blocks, takes over those of `fresh`, and holds `state` from now on.
  void replace(int64_t keep, HeldBlocks& fresh, nb::object state) {
    size_t count = keep + fresh.ids_.size();
    if (count > ids_.capacity()) ids_.reserve(std::max(count, 2 * ids_.capacity()));
    HeldBlocks dropped(pool_);
    dropped.ids_.assign(ids_.begin() + keep, ids_.end());
    ids_.resize(keep);  // from here on nothing can fail
    ids_.insert(ids_.end(), fresh.ids_.begin(), fresh.ids_.end());
    fresh.ids_.clear();
    std::swap(state_, state);
  }

  nb::object state() const { return state_; }
  void set_state(nb::object state) { std::swap(state_, state); }

 private:
  Pool pool_;
  std::vector<int32_t> ids_;
  nb::object state_ = nb::none();
};

class BlockPool {
 public:
  BlockPool(nb::handle num_blocks, nb::handle block_size)
      : num_blocks_(parse_int("BlockPool", "num_blocks", num_blocks)),
        block_size_(parse_int("BlockPool", "block_size", block_size)) {
    cuattn_block_pool* pool;
    check(cuattn_block_pool_create(num_blocks_, block_size_, &pool));
    shared_.reset(pool, cuattn_block_pool_destroy);
    pool_ = pool;
  }

  HeldBlocks hold(nb::handle n) {
    HeldBlocks held(shared_);
    held.allocate(parse_int("BlockPool.allocate", "n", n), num_blocks_);
    return held;
  }

  HeldBlocks hold_prefix(nb::handle tokens, nb::handle salt) {
    HeldBlocks held(shared_);
    held.match_prefix(Tokens("BlockPool.match_prefix", tokens), Prefix(salt), block_size_);
    return held;
  }

  nb::list allocate(nb::handle n) { return hold(n).release(); }

  nb::list match_prefix(nb::handle tokens, nb::handle salt) {
    return hold_prefix(tokens, salt).release();
  }

  void free(nb::handle ids) {
    std::vector<int32_t> list = parse_ids("BlockPool.free", ids);
    check(cuattn_block_pool_free(pool_, list.data(), list.size()));
  }

  void fork(nb::handle ids) {
    std::vector<int32_t> list = parse_ids("BlockPool.fork", ids);
    check(cuattn_block_pool_fork(pool_, list.data(), list.size()));
  }

  int64_t ref_count(nb::handle id) {
    int64_t count;
    int32_t block = parse_int32("BlockPool.ref_count", "id", id);
    check(cuattn_block_pool_ref_count(pool_, block, &count));
    return count;
  }

  int32_t make_writable(nb::handle id) {
    int32_t writable;
    int32_t block = parse_int32("BlockPool.make_writable", "id", id);
    check(cuattn_block_pool_make_writable(pool_, block, &writable));
    return writable;
  }

  void commit(nb::handle ids, nb::handle tokens, nb::handle parent, nb::handle salt) {
    const char* op = "BlockPool.commit";
    std::vector<int32_t> list = parse_ids(op, ids);
    Tokens array(op, tokens);
    Prefix prefix(salt);
    int32_t before = parent.is_none() ? -1 : parse_int32(op, "parent", parent);
    if (before < 0 && !parent.is_none())
      raise(PyExc_ValueError, op, ": parent must be None or a block, got ", before,
            "; pass the block before the first of ids");
    check(cuattn_block_pool_commit(pool_, list.data(), list.size(), array.data(), array.count(),
                                   before, &prefix.options));
  }

  nb::dict stats() {
    cuattn_block_pool_stats stats;
    check(cuattn_block_pool_get_stats(pool_, &stats));
    nb::dict result;
    result["num_blocks"] = stats.num_blocks;
    result["block_size"] = stats.block_size;
    result["free_blocks"] = stats.free_blocks;
    result["used_blocks"] = stats.used_blocks;
    result["shared_blocks"] = stats.shared_blocks;
    result["cached_blocks"] = stats.cached_blocks;
    result["evictable_blocks"] = stats.evictable_blocks;
    result["evictions"] = stats.evictions;
    result["copies"] = stats.copies;
    result["queried_tokens"] = stats.queried_tokens;
    result["matched_tokens"] = stats.matched_tokens;
    return result;
  }

 private:
  int64_t num_blocks_, block_size_;
  Pool shared_;              // with every HeldBlocks
  cuattn_block_pool* pool_;  // the same
};

}  // namespace

void add_block_pool(nb::module_& m) {
  nb::class_<HeldBlocks>(m, "HeldBlocks", "References to blocks that are dropped with the object.")
      .def("__len__", &HeldBlocks::count)
      .def("ids", &HeldBlocks::ids, nb::arg("first") = 0)
      .def("clear", &HeldBlocks::clear)
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", [](HeldBlocks& self, const nb::args&) { self.clear(); })
      .def("fork", &HeldBlocks::fork)
      .def("grow", &HeldBlocks::grow, nb::arg("count"), nb::arg("writes_last") = false)
      .def("replace", &HeldBlocks::replace, nb::arg("keep"), nb::arg("fresh"),
           nb::arg("state").none())
      .def_prop_rw("state", &HeldBlocks::state, &HeldBlocks::set_state,
                   nb::for_setter(nb::arg("state").none()));
  nb::class_<BlockPool>(m, "BlockPool", "The pool under cuattn.BlockPool.")
      .def(nb::init<nb::handle, nb::handle>(), nb::arg("num_blocks").none(),
           nb::arg("block_size").none(),
           nb::sig("def __init__(self, num_blocks: int, block_size: int) -> None"))
      .def("allocate", &BlockPool::allocate, nb::arg("n").none(),
           nb::sig("def allocate(self, n: int) -> list[int]"))
      .def("free", &BlockPool::free, nb::arg("ids").none(),
           nb::sig("def free(self, ids: object) -> None"))
      .def("fork", &BlockPool::fork, nb::arg("ids").none(),
           nb::sig("def fork(self, ids: object) -> None"))
      .def("ref_count", &BlockPool::ref_count, nb::arg("id").none(),
           nb::sig("def ref_count(self, id: int) -> int"))
      .def("make_writable", &BlockPool::make_writable, nb::arg("id").none(),
           nb::sig("def make_writable(self, id: int) -> int"))
      .def("match_prefix", &BlockPool::match_prefix, nb::arg("tokens").none(),
           nb::arg("salt").none(),
           nb::sig("def match_prefix(self, tokens: object, salt: bytes | None) -> list[int]"))
      .def("commit", &BlockPool::commit, nb::arg("ids").none(), nb::arg("tokens").none(),
           nb::arg("parent").none(), nb::arg("salt").none(),
           nb::sig("def commit(self, ids: object, tokens: object, parent: int | None, "
                   "salt: bytes | None) -> None"))
      .def("hold", &BlockPool::hold, nb::arg("n").none(),
           nb::sig("def hold(self, n: int) -> HeldBlocks"))
      .def("hold_prefix", &BlockPool::hold_prefix, nb::arg("tokens").none(), nb::arg("salt").none(),
           nb::sig("def hold_prefix(self, tokens: object, salt: bytes | None) -> HeldBlocks"))
      .def("stats", &BlockPool::stats, nb::sig("def stats(self) -> dict[str, int]"));
}

}  // namespace cuattn::bindings
