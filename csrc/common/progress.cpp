#include "common/progress.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#ifndef MSG_NOSIGNAL  // macOS: a broken pipe is silenced per socket there
#define MSG_NOSIGNAL 0
#endif

namespace epruntime {

namespace {

// Threads started while one lives get no signals: those are for the process's main thread.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t before_;
};

}  // namespace

ProgressPublisher::ProgressPublisher(int fd, const int64_t* cells, size_t num_cells, std::string frame,
                                     double interval_s)
    : fd_(fd), cells_(cells), num_cells_(num_cells), frame_(std::move(frame)), interval_s_(interval_s) {
    const SignalsBlocked blocked;  // until it goes, also where no thread can be had
    thread_ = std::thread([this] { run(); });
}

void ProgressPublisher::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
        close(fd_);
    }
}

void ProgressPublisher::run() {
#ifdef __linux__
    pthread_setname_np(pthread_self(), "epr-progress");
#endif
    const auto interval =
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(interval_s_));
    std::unique_lock<std::mutex> lock(mutex_);
    do {
        if (sent_ == 0) refresh();
        if (!send_rest()) break;
    } while (!wake_.wait_for(lock, interval, [this] { return stopping_; }));
    running_ = false;
    shutdown(fd_, SHUT_RDWR);
}

void ProgressPublisher::refresh() {
    char* to = frame_.data() + frame_.size() - num_cells_ * sizeof(int64_t);
    for (size_t i = 0; i < num_cells_; ++i) {
        const int64_t cell = __atomic_load_n(cells_ + i, __ATOMIC_RELAXED);
        std::memcpy(to + i * sizeof cell, &cell, sizeof cell);
    }
}

// False: the peer is gone.
bool ProgressPublisher::send_rest() {
    while (sent_ < frame_.size()) {
        const ssize_t n = send(fd_, frame_.data() + sent_, frame_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            if (errno == EINTR) continue;
            return errno == EAGAIN || errno == EWOULDBLOCK;
        }
        sent_ += static_cast<size_t>(n);
    }
    sent_ = 0;
    ++num_sent_;
    return true;
}

}  // namespace epruntime
