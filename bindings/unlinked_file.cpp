// SPDX-License-Identifier: Apache-2.0
// The class cuattn._core.UnlinkedFile: a new file without a name, which goes with the object,
// however the process ends. It is made here and not in Python because an interrupt may come between
// any two steps of Python, and would leave a file or a descriptor behind. Next:
// python/cuattn/_kv_swap.py.
#include "bindings/unlinked_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace cuattn::bindings {

namespace nb = nanobind;

namespace {

class UnlinkedFile {
 public:
  // Makes a file at `path`, where none may be, for this user alone, and takes its name away.
  explicit UnlinkedFile(nb::handle path) {
    PyObject* encoded = nullptr;
    if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw nb::python_error();
    nb::object owner = nb::steal(encoded);
    const char* name = PyBytes_AsString(encoded);
    do {
      descriptor_ = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    } while (descriptor_ < 0 && errno == EINTR);
    if (descriptor_ >= 0 && unlink(name) == 0) return;
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
    close();
    throw nb::python_error();
  }
  UnlinkedFile(const UnlinkedFile&) = delete;
  ~UnlinkedFile() { close(); }

  int fileno() const { return descriptor_; }

  void close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }

 private:
  int descriptor_ = -1;
};

}  // namespace

void add_unlinked_file(nb::module_& m) {
  nb::class_<UnlinkedFile>(m, "UnlinkedFile", "A new file without a name, for reading and writing.")
      .def(nb::init<nb::handle>(), nb::arg("path"))
      .def("fileno", &UnlinkedFile::fileno)
      .def("close", &UnlinkedFile::close);
}

}  // namespace cuattn::bindings
