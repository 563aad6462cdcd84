//! What the machine tells: clocks, processor time, memory, names.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the clock that all processes of the machine share.
pub(crate) fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// Processor time of this process so far: user and system, all threads.
pub(crate) fn processor_time() -> u64 {
    nanoseconds(ClockId::ProcessCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    // Both clocks start near zero: neither part is negative.
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Resident memory of this process, in MiB; `None` where there is no `/proc`.
pub(crate) fn resident_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib / 1024.0)
}

/// The processor's name and the number of processors, and the system.
pub(crate) fn description() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let mut fields = info.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(key, _)| key.trim() == name)
    };
    let name = field("model name").map_or("unknown processor", |(_, name)| name.trim());
    let count = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib: u64 = memory
        .split_whitespace()
        .nth(1)
        .and_then(|kib| kib.parse().ok())
        .unwrap_or(0);
    let system = std::env::consts::OS;
    format!("{count} × {name}, {} GiB, {system}", kib.div_ceil(1 << 20))
}

/// The load averages of the last 1, 5 and 15 minutes.
pub(crate) fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split_whitespace()
        .take(3)
        .collect::<Vec<_>>()
        .join(" ")
}

/// The first line that a program prints; "unknown" if it does not run.
pub(crate) fn first_line_of(program: &str, argument: &str) -> String {
    let output = std::process::Command::new(program).arg(argument).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let text = text.unwrap_or_default();
    text.lines().next().unwrap_or("unknown").to_owned()
}
