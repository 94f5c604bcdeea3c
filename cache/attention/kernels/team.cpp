// A team: the thread that has work, and helpers that come if they can. One process has one.
//
// Work is a function that every member calls and that shares itself out: whoever comes takes what is left, and nobody
// waits for a member that has not come. So a helper whose core is somebody else's costs nothing but its help; a team
// of OpenMP begins and ends together, and waits for the slowest to wake up. Helpers look out for work for some
// microseconds, giving way to whoever else wants their core, and then sleep.
//
// A helper whose core is taken in the middle of something is waited for, though. Where that takes a good part of the
// time, the caller works alone for a while, longer each time.

#include <atomic>
#include <cstdint>
#include <pthread.h>
#include <sched.h>

#include "waiting.h"

namespace {

typedef void (*Work)(void*);

const uint64_t CAME = 0x7fff, OPEN = 0x8000, NEXT = 0x10000;  // of the state: helpers that came, open, number of the work
const int64_t SPAN = 20'000'000;                         // nanoseconds of working together that are judged at once
const int64_t SHORTEST = 2 * SPAN, LONGEST = 32 * SPAN;  // of working alone
const int PAUSES = 1024, LOOKS = PAUSES + 64;  // between two looks without, and then with giving way to others

struct Team {
    std::atomic<uint64_t> state{0};
    std::atomic<Work> work{nullptr};
    std::atomic<void*> data{nullptr};
    std::atomic<unsigned> places{0};  // for helpers
    std::atomic<unsigned> gone{0};    // helpers that came and have done their part
    std::atomic<unsigned> asleep{0};
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t news = PTHREAD_COND_INITIALIZER;
    unsigned helpers = 0;                                    // that were started
    int64_t together = 0, waited = 0, alone = 0, until = 0;  // nanoseconds: of this span; the last time alone, and its end

    void run(Work what, void* with, unsigned threads, const int64_t* within) {
        if (threads < 2 || taken.test_and_set(std::memory_order_acquire)) return what(with);
        int64_t begun = now();
        if (begun < until) {
            taken.clear(std::memory_order_release);
            return what(with);
        }
        int64_t spent = now(CLOCK_THREAD_CPUTIME_ID);
        hire(threads - 1);
        work.store(what, std::memory_order_relaxed);
        data.store(with, std::memory_order_relaxed);
        places.store(threads - 1, std::memory_order_relaxed);
        gone.store(0, std::memory_order_relaxed);
        state.store((state.load(std::memory_order_relaxed) / NEXT + 1) * NEXT + OPEN);
        if (asleep.load()) wake();
        what(with);
        uint64_t came = state.fetch_and(~OPEN) & CAME;
        int64_t done = now();
        for (int looks = 0; gone.load(std::memory_order_acquire) < came; looks++) rest(looks);
        int64_t over = now();
        int64_t taken_away = over - begun - (now(CLOCK_THREAD_CPUTIME_ID) - spent);  // somebody else had this core
        judge(over - begun, over - done + (within ? *within : 0) + taken_away, over);
        taken.clear(std::memory_order_release);
    }

private:
    // Whether the help was worth it: if a quarter of the time went in waiting for it, or in waiting for a core, it was not.
    void judge(int64_t took, int64_t vain, int64_t over) {
        together += took;
        waited += vain;
        if (together < SPAN) return;
        alone = waited < together / 4 ? alone / 2 : alone < SHORTEST ? SHORTEST : alone < LONGEST ? alone * 2 : LONGEST;
        if (waited >= together / 4) until = over + alone;
        together = waited = 0;
    }

    void hire(unsigned wanted) {
        for (; helpers < wanted && helpers < CAME; helpers++) {
            pthread_t thread;
            if (pthread_create(&thread, nullptr, [](void* team) -> void* { ((Team*)team)->help(); return nullptr; }, this)) return;
            pthread_detach(thread);
        }
    }

    void wake() {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&news);
        pthread_mutex_unlock(&lock);
    }

    static void rest(int looks) {
        if (looks < PAUSES) relax();
        else sched_yield();
    }

    void help() {
        uint64_t seen = 0;  // number of the work that was done last, or was over
        for (int looks = 0;; looks++) {
            uint64_t now = state.load(std::memory_order_acquire), number = now / NEXT;
            if (number != seen) {
                looks = 0;
                if (!(now & OPEN) || (now & CAME) >= places.load(std::memory_order_relaxed)) {
                    seen = number;
                } else if (state.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) {
                    seen = number;
                    work.load(std::memory_order_relaxed)(data.load(std::memory_order_relaxed));
                    gone.fetch_add(1, std::memory_order_release);
                }
            } else if (looks < LOOKS) {
                rest(looks);
            } else {
                sleep(seen);
                looks = 0;
            }
        }
    }

    void sleep(uint64_t seen) {
        pthread_mutex_lock(&lock);
        asleep.fetch_add(1);
        while (state.load() / NEXT == seen) pthread_cond_wait(&news, &lock);
        asleep.fetch_sub(1);
        pthread_mutex_unlock(&lock);
    }
};

}  // namespace

// `waited`: nanoseconds that the caller has waited for others within the work, once that is done; null: it does not wait.
extern "C" void warmturn_run_parallel(Work work, void* data, unsigned threads, const int64_t* waited) {
    static Team* team = new Team;  // never deleted: helpers look at it until the process ends
    team->run(work, data, threads, waited);
}
