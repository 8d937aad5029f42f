// The little that the kernels need of a standard library. Included once per instruction set, inside a namespace.

template <class T>
static inline T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
static inline T most(T a, T b) {
  return a < b ? b : a;
}

// Memory that only grows, for plain types. Contents are not kept when it grows. Freed with its thread.
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
      data = static_cast<T*>(std::malloc(static_cast<size_t>(n) * sizeof(T)));
      if (!data) std::abort();  // a few kilobytes: nothing sensible is left to do
      size = n;
    }
    return data;
  }
};
