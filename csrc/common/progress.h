// Publishes a rank's progress stamps from a thread that needs neither the interpreter nor its lock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace epruntime {

// Every `interval_s` seconds: the cells are copied over the end of the frame, and the frame is sent.
//
// A peer that does not read is not waited for: a frame that finds no room is dropped, one that was sent in part is
// finished first. The thread ends by itself when the peer is gone.
class ProgressPublisher {
  public:
    // Takes over `fd`, a connected stream socket. `cells` must outlive this object; other threads write them.
    ProgressPublisher(int fd, const int64_t* cells, size_t num_cells, std::string frame, double interval_s);
    ~ProgressPublisher() { stop(); }
    ProgressPublisher(const ProgressPublisher&) = delete;
    ProgressPublisher& operator=(const ProgressPublisher&) = delete;

    // Ends the thread and closes the socket. Safe to call again.
    void stop();
    bool running() const { return running_; }
    int64_t num_sent() const { return num_sent_; }

  private:
    void run();
    void refresh();
    bool send_rest();

    const int fd_;
    const int64_t* const cells_;
    const size_t num_cells_;
    std::string frame_;
    const double interval_s_;
    size_t sent_ = 0;  // bytes of the frame in hand
    std::atomic<bool> running_{true};
    std::atomic<int64_t> num_sent_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace epruntime
