// SPDX-License-Identifier: Apache-2.0
// The class cuattn._core.BlockPool: the C functions of the block pool with lists of ids and numpy
// arrays of tokens. The interpreter lock is kept: the calls are short. Next:
// python/cuattn/block_pool.py.
#include "block_pool.h"

#include <algorithm>
#include <vector>

#include "convert.h"
#include "cuattn/c_api.h"
#include "errors.h"
#include "options.h"

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

class BlockPool {
 public:
  BlockPool(nb::handle num_blocks, nb::handle block_size)
      : num_blocks_(parse_int("BlockPool", "num_blocks", num_blocks)),
        block_size_(parse_int("BlockPool", "block_size", block_size)) {
    check(cuattn_block_pool_create(num_blocks_, block_size_, &pool_));
  }
  BlockPool(const BlockPool&) = delete;
  ~BlockPool() { cuattn_block_pool_destroy(pool_); }

  nb::list allocate(nb::handle n) {
    int64_t count = parse_int("BlockPool.allocate", "n", n);
    std::vector<int32_t> ids(std::clamp<int64_t>(count, 0, num_blocks_));
    check(cuattn_block_pool_allocate(pool_, count, ids.data()));
    return list_of(ids);
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

  nb::list match_prefix(nb::handle tokens) {
    Tokens array("BlockPool.match_prefix", tokens);
    std::vector<int32_t> ids(array.count() / block_size_);
    int64_t matched;
    check(cuattn_block_pool_match_prefix(pool_, array.data(), array.count(), ids.data(), &matched));
    ids.resize(matched);
    return list_of(ids);
  }

  void commit(nb::handle ids, nb::handle tokens, nb::handle parent) {
    const char* op = "BlockPool.commit";
    std::vector<int32_t> list = parse_ids(op, ids);
    Tokens array(op, tokens);
    int32_t before = parent.is_none() ? -1 : parse_int32(op, "parent", parent);
    if (before < 0 && !parent.is_none())
      raise(PyExc_ValueError, op, ": parent must be None or a block, got ", before,
            "; pass the block before the first of ids");
    check(cuattn_block_pool_commit(pool_, list.data(), list.size(), array.data(), array.count(),
                                   before));
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
  cuattn_block_pool* pool_ = nullptr;
};

}  // namespace

void add_block_pool(nb::module_& m) {
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
           nb::sig("def match_prefix(self, tokens: object) -> list[int]"))
      .def("commit", &BlockPool::commit, nb::arg("ids").none(), nb::arg("tokens").none(),
           nb::arg("parent").none(),
           nb::sig("def commit(self, ids: object, tokens: object, parent: int | None) -> "
                   "None"))
      .def("stats", &BlockPool::stats, nb::sig("def stats(self) -> dict[str, int]"));
}

}  // namespace cuattn::bindings
