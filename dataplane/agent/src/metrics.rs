// SPDX-License-Identifier: Apache-2.0
//! `/metrics`: what the sandbox uses, from its cgroup where that is visible, else from `/proc`.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use hyper::StatusCode;

use crate::agent::{Agent, now_ms};
use crate::http::body::{Reply, error, json};
use crate::sys::{pool, proc};

const CGROUP: &str = "/sys/fs/cgroup";
const MIB: u64 = 1024 * 1024;
/// Unit of times in `/proc/stat` (proc(5)): hundredths of a second on all Linux systems.
const TICK_US: u64 = 10_000;

/// Processor time at the last look, to make a rate of it.
#[derive(Default)]
pub struct CpuClock {
    last: Option<(Instant, u64)>,
}

impl CpuClock {
    /// Share of all processors used since the last look, in percent; 0 at the first.
    fn percent(&mut self, now: Instant, used_us: u64, cpu_count: f64) -> f64 {
        let before = self.last.replace((now, used_us));
        let Some((then, used_then)) = before else {
            return 0.0;
        };
        let elapsed_us = now.duration_since(then).as_secs_f64() * 1e6;
        if elapsed_us < 1.0 || cpu_count <= 0.0 {
            return 0.0;
        }
        // Microseconds of years fit into the 53 bits of an f64.
        #[allow(clippy::cast_precision_loss)]
        let used = used_us.saturating_sub(used_then) as f64;
        let percent = used / elapsed_us / cpu_count * 100.0;
        (percent.clamp(0.0, 100.0) * 100.0).round() / 100.0
    }
}

#[derive(Default)]
struct Usage {
    cpu_us: u64,
    memory_total: u64,
    memory_used: u64,
    memory_cache: u64,
}

/// Answers with the use of processor, memory and disk.
pub async fn serve(agent: &Arc<Agent>) -> Reply {
    let agent = Arc::clone(agent);
    match pool::run(move || measure(&agent)).await {
        Ok(body) => json(StatusCode::OK, body),
        Err(err) => error(StatusCode::INTERNAL_SERVER_ERROR, err.to_string()),
    }
}

fn measure(agent: &Agent) -> String {
    let (cpus, memory_limit, disk_limit) = {
        let settings = agent.settings();
        (
            settings.cpu_count,
            settings.memory_bytes,
            settings.disk_bytes,
        )
    };
    let usage = from_cgroup_v2(Path::new(CGROUP))
        .or_else(|| from_cgroup_v1(Path::new(CGROUP)))
        .or_else(|| from_proc(agent))
        .unwrap_or_default();
    let cpus = cpus.unwrap_or_else(|| {
        std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64)
    });
    // Without a limit, what a cgroup calls its limit is a number without meaning.
    let machine =
        || proc::read_at(agent.proc_dir.as_fd(), "meminfo").map_or(0, |m| kib(&m, "MemTotal:"));
    let memory_total = memory_limit.unwrap_or_else(|| match usage.memory_total {
        0 => machine(),
        limit => limit.min(machine()),
    });
    let percent = {
        let mut clock = agent
            .cpu_clock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        clock.percent(Instant::now(), usage.cpu_us, cpus)
    };
    let (disk_used, disk_total) = disk(disk_limit);
    serde_json::json!({
        "ts": now_ms() / 1000,
        "cpu_count": cpus.ceil().max(1.0) as u32,
        "cpu_used_pct": percent,
        "mem_total": memory_total,
        "mem_used": usage.memory_used,
        "mem_cache": usage.memory_cache,
        "mem_total_mib": memory_total / MIB,
        "mem_used_mib": usage.memory_used / MIB,
        "disk_used": disk_used,
        "disk_total": disk_total,
    })
    .to_string()
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The value after `key` in lines of `key value`.
fn field(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.trim_start_matches([':', ' ', '\t'])
        .split_ascii_whitespace()
        .next()?
        .parse()
        .ok()
}

/// The root of a cgroup tree has no `memory.current`: where there is one, it is the sandbox's own.
fn from_cgroup_v2(root: &Path) -> Option<Usage> {
    let current = number(&root.join("memory.current"))?;
    let stat = fs::read_to_string(root.join("memory.stat")).ok()?;
    let cache = field(&stat, "file ").unwrap_or(0);
    let cpu = fs::read_to_string(root.join("cpu.stat")).ok()?;
    Some(Usage {
        cpu_us: field(&cpu, "usage_usec")?,
        memory_total: number(&root.join("memory.max")).unwrap_or(0),
        memory_used: current.saturating_sub(cache),
        memory_cache: cache,
    })
}

fn from_cgroup_v1(root: &Path) -> Option<Usage> {
    let memory = root.join("memory");
    let current = number(&memory.join("memory.usage_in_bytes"))?;
    let stat = fs::read_to_string(memory.join("memory.stat")).ok()?;
    let cache = field(&stat, "total_cache")
        .or_else(|| field(&stat, "cache"))
        .unwrap_or(0);
    let cpu_ns = ["cpuacct", "cpu,cpuacct", "cpu"]
        .iter()
        .find_map(|name| number(&root.join(name).join("cpuacct.usage")))?;
    Some(Usage {
        cpu_us: cpu_ns / 1000,
        memory_total: number(&memory.join("memory.limit_in_bytes")).unwrap_or(0),
        memory_used: current.saturating_sub(cache),
        memory_cache: cache,
    })
}

/// A line of `/proc/meminfo`, in bytes.
fn kib(meminfo: &str, key: &str) -> u64 {
    field(meminfo, key).map_or(0, |kib| kib * 1024)
}

fn from_proc(agent: &Agent) -> Option<Usage> {
    let proc_dir = agent.proc_dir.as_fd();
    let memory = proc::read_at(proc_dir, "meminfo").ok()?;
    let cache = kib(&memory, "Cached:");
    let total = kib(&memory, "MemTotal:");
    let stat = proc::read_at(proc_dir, "stat").ok()?;
    let cpu = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let times: Vec<u64> = cpu.split_ascii_whitespace().flat_map(str::parse).collect();
    // user nice system, not idle and iowait, then irq softirq steal.
    let busy: u64 = times
        .iter()
        .take(3)
        .chain(times.iter().skip(5).take(3))
        .sum();
    Some(Usage {
        cpu_us: busy * TICK_US,
        memory_total: total,
        memory_used: total
            .saturating_sub(kib(&memory, "MemFree:") + kib(&memory, "Buffers:") + cache),
        memory_cache: cache,
    })
}

/// Used and total bytes of the root file system; a set limit is the total.
fn disk(limit: Option<u64>) -> (u64, u64) {
    let Ok(stat) = rustix::fs::statvfs("/") else {
        return (0, limit.unwrap_or(0));
    };
    let total = stat.f_blocks * stat.f_frsize;
    let used = total.saturating_sub(stat.f_bavail * stat.f_frsize);
    match limit {
        Some(limit) => (used.min(limit), limit),
        None => (used, total),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn rates() {
        let mut clock = CpuClock::default();
        let start = Instant::now();
        assert!(clock.percent(start, 5_000, 2.0).abs() < f64::EPSILON);
        let later = start + Duration::from_secs(1);
        assert!((clock.percent(later, 1_005_000, 2.0) - 50.0).abs() < 0.01);
        assert!((clock.percent(later, 9_000_000, 2.0)).abs() < f64::EPSILON);
    }

    #[test]
    fn reads_both_cgroup_versions() {
        let dir = crate::testing::TempDir::new();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert!(from_cgroup_v2(dir.path()).is_none());
        write("memory.current", "1000\n");
        write("memory.max", "max\n");
        write("memory.stat", "anon 1\nfile 300\nfile_mapped 7\n");
        write("cpu.stat", "usage_usec 77\nuser_usec 1\n");
        let usage = from_cgroup_v2(dir.path()).unwrap();
        assert_eq!(
            (usage.cpu_us, usage.memory_used, usage.memory_cache),
            (77, 700, 300)
        );
        write("memory/memory.usage_in_bytes", "50\n");
        write("memory/memory.limit_in_bytes", "90\n");
        write("memory/memory.stat", "cache 1\ntotal_cache 20\n");
        write("cpu/cpuacct.usage", "5000\n");
        let usage = from_cgroup_v1(dir.path()).unwrap();
        assert_eq!(
            (usage.cpu_us, usage.memory_used, usage.memory_total),
            (5, 30, 90)
        );
    }
}
