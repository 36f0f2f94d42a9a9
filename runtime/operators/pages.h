// Weights in large pages. A processor must look up each page that it reads, and a pass reads all weights: for 100 MB, 25,000 pages of 4 KB.
// Mapped files use such small pages. A process's memory can use pages of 2 MB, so files are copied into it.
#pragma once
#include "session.h"

#ifdef __linux__
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif
#include <map>
#include <memory>

namespace eesd {

using Pages = std::shared_ptr<uint8_t>;  // a whole file

#ifdef __linux__
// A copy of a file; null if the file does not have the number `inode`, is larger than `most` bytes, or cannot be read.
inline Pages copy_to_large_pages(const char *path, uintmax_t inode, int64_t most) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  struct stat about = {};
  if (file < 0) return nullptr;
  const bool fits = fstat(file, &about) == 0 && about.st_ino == inode && about.st_size <= most;
  const size_t size = static_cast<size_t>(about.st_size);
  void *memory = fits ? mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
  Pages pages;
  if (memory != MAP_FAILED) {
    pages.reset(static_cast<uint8_t *>(memory), [size](uint8_t *start) { munmap(start, size); });
    madvise(memory, size, MADV_HUGEPAGE);
    size_t done = 0;
    for (ssize_t read = 1; read > 0 && done < size; done += static_cast<size_t>(read > 0 ? read : 0))
      read = pread(file, pages.get() + done, size - done, static_cast<off_t>(done));
    if (done < size) pages = nullptr;
  }
  close(file);
  return pages;
}

// The address of a mapped file's bytes in large pages; the unchanged address if the bytes are not from a file, or if the file is larger
// than `most`. Sessions of a process share the copy of a file. Sessions are made one after another.
inline const uint8_t *in_large_pages(const uint8_t *bytes, int64_t most, std::vector<Pages> &held) {
  static std::map<std::string, std::weak_ptr<uint8_t>> copies;
  const uintptr_t address = reinterpret_cast<uintptr_t>(bytes);
  FILE *maps = fopen("/proc/self/maps", "re");
  char line[8192], path[4097];
  uintptr_t first, last, offset;
  uintmax_t inode;
  while (maps && fgets(line, sizeof line, maps)) {
    const char *form = "%" SCNxPTR "-%" SCNxPTR " %*s %" SCNxPTR " %*s %" SCNuMAX " %4096[^\n]";
    if (sscanf(line, form, &first, &last, &offset, &inode, path) != 5 || address < first || address >= last) continue;
    std::weak_ptr<uint8_t> &copy = copies[std::to_string(inode) + path];
    held.push_back(copy.lock());
    if (!held.back()) copy = held.back() = copy_to_large_pages(path, inode, most);
    if (held.back()) bytes = held.back().get() + offset + (address - first);
    break;
  }
  if (maps) fclose(maps);
  return bytes;
}
#else
inline const uint8_t *in_large_pages(const uint8_t *bytes, int64_t, std::vector<Pages> &) { return bytes; }
#endif

}  // namespace eesd
