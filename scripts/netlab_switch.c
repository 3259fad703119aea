/* The lab's Ethernet switch: frames between the hosts' cables, and what a network does to them.
 *
 *     netlab_switch SOCKET NAMESPACE...      prints "ready" when all cables are there
 *
 * Cable i is the device v<i> in this namespace; its other end is eth0 in the namespace of host i.
 * A frame from host i to host j passes the link (i, j), which has a share of frames that are lost and a delay, and
 * the cables of i and j, which have a rate. Commands come over SOCKET, one a connection, answered by "ok" or a reason:
 *
 *     lose FROM TO PARTS       of a million frames; 1000000 is a cut
 *     delay FROM TO MICROSECONDS
 *     rate HOST MBIT           0 for as fast as it goes
 *     multicast HOST 0|1       whether frames for groups are delivered to the host
 *     capture PATH | capture   write all frames that hosts send to a pcap file, or stop
 *     seed NUMBER              of what decides which frames are lost
 *     counts                   "sent N lost N late N": frames taken, lost on links, dropped by a full queue
 *
 * FROM and TO are hosts, or -1 for all.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/ethtool.h>
#include <linux/if_packet.h>
#include <linux/sockios.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MOST_HOSTS 250
#define LARGEST 65536
#define MEMORY (16 << 20) /* bytes that wait for this process on each cable, while it is not scheduled */
#define LONGEST 500000000ull /* nanoseconds that frames wait for a slow cable: the memory of a cheap switch */
#define BURST 32
#define MILLION 1000000u
#define ETHERNET_GAP 24 /* bytes of preamble, checksum and gap that a cable carries beside each frame */

struct frame {
    uint64_t due, number;
    int to, length;
    unsigned char bytes[];
};
struct link {
    uint32_t lost;
    uint64_t delay, last_due;
};
struct cable {
    int socket, multicast;
    double nanoseconds_a_byte;
    uint64_t busy_up, busy_down;
    int queued;
};

static struct cable cables[MOST_HOSTS];
static struct link links[MOST_HOSTS][MOST_HOSTS];
static int hosts;
static struct {
    unsigned char address[6];
    int host;
} known[4096];
static int known_count;
static struct frame **heap;
static int heap_count, heap_room;
static uint64_t numbers, state = 88172645463325252ull, sent, lost, late;
static FILE *capture;

static uint64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000ull + (uint64_t)at.tv_nsec;
}

static uint32_t draw(void) { /* xorshift64* */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)((state * 2685821657736338717ull) >> 32) % MILLION;
}

static void fail(const char *what) {
    perror(what);
    exit(2);
}

static int before(const struct frame *a, const struct frame *b) {
    return a->due < b->due || (a->due == b->due && a->number < b->number);
}

static void push(struct frame *frame) {
    if (heap_count == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 1024;
        if (!(heap = realloc(heap, (size_t)heap_room * sizeof *heap))) fail("memory");
    }
    int at = heap_count++;
    for (; at && before(frame, heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = frame;
}

static struct frame *pop(void) {
    struct frame *first = heap[0], *last = heap[--heap_count];
    int at = 0, child;
    while ((child = 2 * at + 1) < heap_count) {
        if (child + 1 < heap_count && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], last)) break;
        heap[at] = heap[child], at = child;
    }
    heap[at] = last;
    return first;
}

static int host_of(const unsigned char *address) {
    for (int i = 0; i < known_count; i++)
        if (!memcmp(known[i].address, address, 6)) return known[i].host;
    return -1;
}

static void learn(const unsigned char *address, int host) {
    for (int i = 0; i < known_count; i++)
        if (!memcmp(known[i].address, address, 6)) {
            known[i].host = host;
            return;
        }
    if (known_count < (int)(sizeof known / sizeof *known)) {
        memcpy(known[known_count].address, address, 6);
        known[known_count++].host = host;
    }
}

static uint64_t occupy(uint64_t *busy, uint64_t at, double nanoseconds_a_byte, int length) {
    /* When the frame has passed a cable; 0 when its queue is full. */
    uint64_t start = *busy > at ? *busy : at;
    if (nanoseconds_a_byte <= 0) return at;
    if (start - at > LONGEST) {
        late++;
        return 0;
    }
    return *busy = start + (uint64_t)((length + ETHERNET_GAP) * nanoseconds_a_byte);
}

static void deliver(int to, const unsigned char *bytes, int length) {
    /* A cable that is down carries nothing. */
    if (send(cables[to].socket, bytes, (size_t)length, MSG_DONTWAIT) < 0 && errno != ENETDOWN) late++;
}

static void forward(int from, int to, const unsigned char *bytes, int length, uint64_t at) {
    struct link *link = &links[from][to];
    struct cable *down = &cables[to];
    if (bytes[0] & 1 && bytes[0] != 255 && !down->multicast) return;
    if (link->lost && draw() < link->lost) {
        lost++;
        return;
    }
    uint64_t due = occupy(&down->busy_down, at, down->nanoseconds_a_byte, length);
    if (!due) return;
    due += link->delay;
    if (due < link->last_due) due = link->last_due; /* a shorter delay does not turn the order round */
    if (due <= now() && !down->queued) {
        deliver(to, bytes, length);
        return;
    }
    struct frame *frame = malloc(sizeof *frame + (size_t)length);
    if (!frame) fail("memory");
    *frame = (struct frame){.due = due, .number = numbers++, .to = to, .length = length};
    memcpy(frame->bytes, bytes, (size_t)length);
    link->last_due = due;
    down->queued++;
    push(frame);
}

static void record(const unsigned char *bytes, int length) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    uint32_t head[4] = {(uint32_t)at.tv_sec, (uint32_t)(at.tv_nsec / 1000), (uint32_t)length, (uint32_t)length};
    fwrite(head, sizeof head, 1, capture);
    fwrite(bytes, (size_t)length, 1, capture);
}

static void take(int from) {
    static unsigned char bytes[LARGEST];
    for (int round = 0; round < BURST; round++) {
        int length = (int)recv(cables[from].socket, bytes, sizeof bytes, MSG_DONTWAIT);
        if (length < 14) return;
        sent++;
        if (capture) record(bytes, length);
        learn(bytes + 6, from);
        uint64_t at = occupy(&cables[from].busy_up, now(), cables[from].nanoseconds_a_byte, length);
        if (!at) continue;
        int to = bytes[0] & 1 ? -1 : host_of(bytes);
        if (to >= 0 && to != from) forward(from, to, bytes, length, at);
        for (int each = 0; to < 0 && each < hosts; each++)
            if (each != from) forward(from, each, bytes, length, at);
    }
}

static void end_capture(void) {
    if (capture) fclose(capture);
    capture = NULL;
}

static const char *start_capture(const char *path) {
    const uint32_t head[6] = {0xa1b2c3d4, 2 | 4 << 16, 0, 0, LARGEST, 1};
    end_capture();
    if (!(capture = fopen(path, "wb"))) return strerror(errno);
    fwrite(head, sizeof head, 1, capture);
    return "ok";
}

static const char *set_links(const char *what, int from, int to, long value) {
    for (int i = 0; i < hosts; i++)
        for (int j = 0; j < hosts; j++) {
            if ((from >= 0 && i != from) || (to >= 0 && j != to)) continue;
            if (*what == 'l') links[i][j].lost = (uint32_t)value;
            else links[i][j].delay = (uint64_t)value * 1000;
        }
    return "ok";
}

static const char *set_cable(const char *what, int host, double value) {
    struct cable *cable = &cables[host];
    if (*what == 'r') cable->nanoseconds_a_byte = value > 0 ? 8000.0 / value : 0;
    else cable->multicast = value != 0;
    return "ok";
}

static const char *obey(const char *line) {
    static char answer[128];
    char word[16] = "", path[256] = "";
    int from, to;
    double value;
    unsigned long long seed;
    if (sscanf(line, "%15s", word) != 1) return "an empty command";
    int pair = !strcmp(word, "lose") || !strcmp(word, "delay");
    int one = !strcmp(word, "rate") || !strcmp(word, "multicast");
    if (pair && sscanf(line, "%*s %d %d %lf", &from, &to, &value) == 3 && from < hosts && to < hosts)
        return set_links(word, from, to, (long)value);
    if (one && sscanf(line, "%*s %d %lf", &from, &value) == 2 && from >= 0 && from < hosts)
        return set_cable(word, from, value);
    if (!strcmp(word, "capture")) {
        if (sscanf(line, "%*s %255[^\n]", path) == 1) return start_capture(path);
        end_capture();
        return "ok";
    }
    if (sscanf(line, "seed %llu", &seed) == 1) {
        state = seed * 2654435761u + 88172645463325252ull;
        return "ok";
    }
    if (!strcmp(word, "counts")) {
        snprintf(answer, sizeof answer, "sent %llu lost %llu late %llu", (unsigned long long)sent,
                 (unsigned long long)lost, (unsigned long long)late);
        return answer;
    }
    return "this command is not known, or a host of it";
}

static void listen_to(int door) {
    char line[512];
    struct timeval patience = {.tv_sec = 1};
    int caller = accept(door, NULL, NULL);
    if (caller < 0) return;
    setsockopt(caller, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ssize_t length = recv(caller, line, sizeof line - 1, 0);
    if (length > 0) {
        line[length] = 0;
        const char *answer = obey(line);
        send(caller, answer, strlen(answer), MSG_NOSIGNAL);
    }
    close(caller);
}

static void no_offloads(const char *namespace) {
    /* The host makes whole frames: what is lost is a frame, and a capture shows what a real cable carries. */
    char path[256];
    struct ethtool_value off = {.cmd = ETHTOOL_STXCSUM};
    struct ifreq request = {.ifr_name = "eth0"};
    request.ifr_data = (char *)&off;
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || setns(file, CLONE_NEWNET)) fail(path);
    close(file);
    int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (any < 0 || ioctl(any, SIOCETHTOOL, &request)) fail("switching offloads off");
    close(any);
}

static int open_cable(int host) {
    char name[16];
    int on = 1, memory = MEMORY;
    snprintf(name, sizeof name, "v%d", host);
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    address.sll_ifindex = (int)if_nametoindex(name);
    struct packet_mreq all = {.mr_ifindex = address.sll_ifindex, .mr_type = PACKET_MR_PROMISC};
    int cable = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
    if (cable < 0 || setsockopt(cable, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on)
        || setsockopt(cable, SOL_SOCKET, SO_RCVBUFFORCE, &memory, sizeof memory)
        || setsockopt(cable, SOL_SOCKET, SO_SNDBUFFORCE, &memory, sizeof memory)
        || setsockopt(cable, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all)
        || bind(cable, (struct sockaddr *)&address, sizeof address))
        fail(name);
    return cable;
}

static int open_door(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int door = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    unlink(path);
    if (door < 0 || bind(door, (struct sockaddr *)&address, sizeof address) || listen(door, 64)) fail(path);
    return door;
}

int main(int count, char **words) {
    static struct pollfd watched[MOST_HOSTS + 1];
    int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    hosts = count - 2;
    if (hosts < 1 || hosts > MOST_HOSTS) return 2;
    for (int i = 0; i < hosts; i++) no_offloads(words[i + 2]);
    if (own < 0 || setns(own, CLONE_NEWNET)) fail("the switch's own namespace");
    for (int i = 0; i < hosts; i++) {
        cables[i] = (struct cable){.socket = open_cable(i), .multicast = 1};
        watched[i] = (struct pollfd){.fd = cables[i].socket, .events = POLLIN};
    }
    int door = open_door(words[1]);
    watched[hosts] = (struct pollfd){.fd = door, .events = POLLIN};
    puts("ready");
    fflush(stdout);
    for (;;) {
        uint64_t at = now();
        while (heap_count && heap[0]->due <= at) {
            struct frame *frame = pop();
            deliver(frame->to, frame->bytes, frame->length);
            cables[frame->to].queued--;
            free(frame);
        }
        struct timespec wait = {0};
        if (heap_count) {
            uint64_t left = heap[0]->due - at;
            wait = (struct timespec){.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
        } else if (capture) fflush(capture);
        if (ppoll(watched, (nfds_t)hosts + 1, heap_count ? &wait : NULL, NULL) < 0 && errno != EINTR) fail("poll");
        for (int i = 0; i < hosts; i++)
            if (watched[i].revents) take(i);
        if (watched[hosts].revents) listen_to(door);
    }
}
