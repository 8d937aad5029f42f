// The little that the kernels need of a standard library. Included once per instruction set, inside a namespace.

template <class T>
static inline T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
static inline T most(T a, T b) {
  return a < b ? b : a;
}

// Memory on whole cache lines that only grows, for plain types. Contents are lost when it grows. Freed with its thread.
template <class T>
struct Buffer {
  T* data = nullptr;
  int64_t size = 0;

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data); }

  T* at_least(int64_t n) {
    if (n > size) {
      std::free(data);
      const size_t bytes = (static_cast<size_t>(n) * sizeof(T) + 63) / 64 * 64;
      data = static_cast<T*>(std::aligned_alloc(64, bytes));
      if (!data) std::abort();  // a few kilobytes: nothing sensible is left to do
      size = n;
    }
    return data;
  }
};
