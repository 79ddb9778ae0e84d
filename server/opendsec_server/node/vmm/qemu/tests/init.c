/* SPDX-License-Identifier: AGPL-3.0-only */
/* Init of a test guest: counts on the console and on its disk, keeps a pattern in memory and says
 * so if it ever changes. Kernel command line: test.flood, test.exit (both after count 3);
 * test.fill: every 20 counts, 96 MiB are used and given back. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 1 << 20, SECTOR = 512 };
static uint64_t pattern[WORDS];

static int read_file(const char *path, char *into, size_t size) {
  int fd = open(path, O_RDONLY);
  if (fd < 0) return -1;
  ssize_t got = read(fd, into, size - 1);
  close(fd);
  into[got < 0 ? 0 : got] = 0;
  return (int)got;
}

static void load_modules(void) {
  char line[256], path[300];
  FILE *list = fopen("/modules.list", "r");
  while (list && fgets(line, sizeof line, list)) {
    line[strcspn(line, "\n")] = 0;
    snprintf(path, sizeof path, "/modules/%s", line);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (syscall(SYS_finit_module, fd, "", 0)) printf("no module %s\n", line);
    close(fd);
  }
}

static int find_disk(const char *wanted) {
  char path[64], serial[64];
  for (char letter = 'a'; letter <= 'z'; letter++) {
    snprintf(path, sizeof path, "/sys/block/vd%c/serial", letter);
    memset(serial, 0, sizeof serial);
    if (read_file(path, serial, sizeof serial) < 0) continue;
    serial[strcspn(serial, "\n")] = 0;
    if (strcmp(serial, wanted)) continue;
    snprintf(path, sizeof path, "/dev/vd%c", letter);
    return open(path, O_RDWR);
  }
  return -1;
}

static void network(void) {
  int fd = socket(AF_INET, SOCK_DGRAM, 0);
  struct ifreq request = {.ifr_name = "eth0"};
  struct sockaddr_in *address = (struct sockaddr_in *)&request.ifr_addr;
  address->sin_family = AF_INET;
  inet_pton(AF_INET, "169.254.0.21", &address->sin_addr);
  ioctl(fd, SIOCSIFADDR, &request);
  inet_pton(AF_INET, "255.255.255.252", &address->sin_addr);
  ioctl(fd, SIOCSIFNETMASK, &request);
  ioctl(fd, SIOCGIFFLAGS, &request);
  request.ifr_flags |= IFF_UP;
  if (ioctl(fd, SIOCSIFFLAGS, &request)) puts("no network");
  close(fd);
}

static uint64_t next(uint64_t x) { return x * 6364136223846793005u + 1442695040888963407u; }

int main(void) {
  char cmdline[4096], sector[SECTOR];
  mkdir("/proc", 0755);
  mkdir("/sys", 0755);
  mkdir("/dev", 0755);
  mount("none", "/proc", "proc", 0, "");
  mount("none", "/sys", "sysfs", 0, "");
  mount("none", "/dev", "devtmpfs", 0, "");
  setvbuf(stdout, NULL, _IOLBF, 0);
  read_file("/proc/cmdline", cmdline, sizeof cmdline);
  load_modules();
  network();
  int disk = find_disk("disk");
  if (disk < 0) puts("no disk");
  uint64_t seed = 1;
  for (long count = 1;; count++) {
    if (count > 1) {
      uint64_t expected = seed;
      for (int i = 0; i < WORDS; i += 64, expected = next(expected))
        if (pattern[i] != expected) { printf("BAD memory at %d\n", i); break; }
    }
    seed = next(seed + count);
    uint64_t value = seed;
    for (int i = 0; i < WORDS; i += 64, value = next(value)) pattern[i] = value;
    memset(sector, 0, sizeof sector);
    snprintf(sector, sizeof sector, "%ld", count);
    if (pwrite(disk, sector, sizeof sector, count * SECTOR) != SECTOR || fsync(disk))
      puts("BAD disk");
    printf("count %ld\n", count);
    if (count == 3 && strstr(cmdline, "test.exit")) return 1;
    if (count == 3 && strstr(cmdline, "test.flood"))
      for (long line = 0;; line++) printf("flood %ld: a guest that prints for ever\n", line);
    if (count % 20 == 0 && strstr(cmdline, "test.fill")) {
      size_t size = 96 << 20;
      char *much = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      memset(much, 1, size);
      munmap(much, size);
      puts("filled");
    }
    struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    nanosleep(&pause, NULL);
  }
}
