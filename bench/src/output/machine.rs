//! Describes the machine used for a run. It doesn't include the host name because reports may be
//! shared.

use std::{fs, thread};

use serde::{Deserialize, Serialize};

/// Used if information is not available from the kernel.
const UNKNOWN: &str = "unknown";

/// Kernel, processor and memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Name and version of the kernel, and the architecture.
    pub kernel: String,
    /// Model of the first processor.
    pub cpu: String,
    /// Number of logical processors that this process can use.
    pub cores: usize,
    /// Memory managed by the kernel in bytes, or 0 if unknown.
    pub memory_bytes: u64,
}

impl Machine {
    /// Describes this machine. If information can't be read, e.g. in a container without `/proc`,
    /// it's `unknown` or 0.
    #[must_use]
    pub fn this() -> Self {
        let uname = rustix::system::uname();
        let part = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self {
            kernel: format!(
                "{} {} {}",
                part(uname.sysname()),
                part(uname.release()),
                part(uname.machine())
            ),
            cpu: cpu_model(&read("/proc/cpuinfo")),
            cores: thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: memory(&read("/proc/meminfo")),
        }
    }
}

/// Returns the model from `/proc/cpuinfo`. On x86, this is a name. On Arm, it's the numbers of the
/// implementer and part.
fn cpu_model(cpuinfo: &str) -> String {
    let field = |name| lines_of(cpuinfo).find(|(key, _)| *key == name);
    if let Some((_, model)) = field("model name") {
        return model.to_owned();
    }
    match (field("CPU implementer"), field("CPU part")) {
        (Some((_, implementer)), Some((_, part))) => {
            format!("implementer {implementer} part {part}")
        }
        _ => UNKNOWN.to_owned(),
    }
}

/// Returns `MemTotal` from `/proc/meminfo`, where 1 kB is 1024 bytes.
fn memory(meminfo: &str) -> u64 {
    let total = lines_of(meminfo).find(|(key, _)| *key == "MemTotal");
    total
        .and_then(|(_, value)| value.strip_suffix(" kB")?.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib.saturating_mul(1024))
}

fn lines_of(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(key, value)| (key.trim(), value.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_parsed() {
        let x86 = "processor\t: 0\nmodel name\t: AMD EPYC 7B13\n\nmodel name\t: other\n";
        assert_eq!(cpu_model(x86), "AMD EPYC 7B13");
        let arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n";
        assert_eq!(cpu_model(arm), "implementer 0x41 part 0xd0c");
        assert_eq!(cpu_model(""), "unknown");
        assert_eq!(
            memory("MemTotal:       24683900 kB\nMemFree: 1 kB\n"),
            24_683_900 * 1024
        );
        assert_eq!(memory("MemTotal: many\n"), 0);
    }

    #[test]
    fn machine_reports_kernel() {
        let machine = Machine::this();
        assert!(machine.kernel.starts_with("Linux "), "{machine:?}");
        assert!(machine.cores > 0);
    }
}
