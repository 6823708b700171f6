//! Which sockets of which programs are to be rsockets, as rdma-core configures it.
//!
//! `/etc/rdma/rsocket/preload_config` has lines `PROGRAM DOMAIN TYPE PROTOCOL`: the beginning of a
//! program's name, `INET` or `INET6`, `STREAM` or `DGRAM`, `TCP` or `UDP`; `*` stands for all of a
//! kind. With such lines only sockets that one describes become rsockets, without any all do.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs;
use std::sync::OnceLock;
use std::time::Duration;

use crate::rdma;

/// The file.
const FILE: &str = "/etc/rdma/rsocket/preload_config";

/// Level of the options of rsockets.
const SOL_RDMA: c_int = 0x10000;

/// Options that the environment sets, by their names.
const OPTIONS: [(&str, c_int); 3] = [("RS_SQ_SIZE", 0), ("RS_RQ_SIZE", 1), ("RS_INLINE", 2)];

unsafe extern "C" {
    /// Name of this program, without its folder.
    static program_invocation_short_name: *const c_char;
}

/// A line of the file: members are `None` for all.
#[derive(Debug, PartialEq)]
struct Rule {
    program: Option<String>,
    domain: Option<c_int>,
    kind: Option<c_int>,
    protocol: Option<c_int>,
}

/// A word of a line: `None` for one that is not known.
fn word(text: &str, prefixes: &[&str], values: &[(&str, c_int)]) -> Option<Option<c_int>> {
    if text == "*" {
        return Some(None);
    }
    let upper = text.to_ascii_uppercase();
    let bare = prefixes.iter().find_map(|p| upper.strip_prefix(p));
    let bare = bare.unwrap_or(&upper);
    let found = values.iter().find(|(name, _)| *name == bare);
    found.map(|(_, value)| Some(*value))
}

/// The rules of a file's text. A line that cannot be read is none.
fn rules(text: &str) -> Vec<Rule> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let mut next = || words.next();
        let program = next().filter(|word| !word.starts_with('#'))?;
        Some(Rule {
            program: (program != "*").then(|| program.to_ascii_lowercase()),
            domain: word(
                next()?,
                &["AF_", "PF_"],
                &[("INET", libc::AF_INET), ("INET6", libc::AF_INET6)],
            )?,
            kind: word(
                next()?,
                &["SOCK_"],
                &[("STREAM", libc::SOCK_STREAM), ("DGRAM", libc::SOCK_DGRAM)],
            )?,
            protocol: word(
                next()?,
                &["IPPROTO_"],
                &[("TCP", libc::IPPROTO_TCP), ("UDP", libc::IPPROTO_UDP)],
            )?,
        })
    };
    text.lines().filter_map(line).collect()
}

impl Rule {
    fn is_about(&self, program: &str, domain: c_int, kind: c_int, protocol: c_int) -> bool {
        let begins = |name: &String| program.to_ascii_lowercase().starts_with(name.as_str());
        let protocol = match (protocol, kind) {
            (0, libc::SOCK_STREAM) => libc::IPPROTO_TCP,
            (0, libc::SOCK_DGRAM) => libc::IPPROTO_UDP,
            (protocol, _) => protocol,
        };
        self.program.as_ref().is_none_or(begins)
            && self.domain.is_none_or(|d| d == domain)
            && self.kind.is_none_or(|k| k == kind)
            && self.protocol.is_none_or(|p| p == protocol)
    }
}

/// Whether a socket is to be an rsocket.
pub(crate) fn wants(domain: c_int, kind: c_int, protocol: c_int) -> bool {
    static RULES: OnceLock<Vec<Rule>> = OnceLock::new();
    if !matches!(domain, libc::AF_INET | libc::AF_INET6)
        || !matches!(kind, libc::SOCK_STREAM | libc::SOCK_DGRAM)
    {
        return false;
    }
    let rules = RULES.get_or_init(|| rules(&fs::read_to_string(FILE).unwrap_or_default()));
    if rules.is_empty() {
        return true;
    }
    // SAFETY: the C library's name of this program, which ends with a zero byte.
    let program = unsafe { CStr::from_ptr(program_invocation_short_name) };
    let program = program.to_string_lossy();
    rules
        .iter()
        .any(|rule| rule.is_about(&program, domain, kind, protocol))
}

/// Whether servers fork for each connection (`RDMAV_FORK_SAFE`).
pub(crate) fn is_fork_safe() -> bool {
    static IS_SAFE: OnceLock<bool> = OnceLock::new();
    *IS_SAFE.get_or_init(|| number("RDMAV_FORK_SAFE").is_some_and(|n| n != 0))
}

/// Longest wait of a server for a client that was asked to connect: `RISER_RSOCKET_PATIENCE` in milliseconds, an
/// hour at most, or two seconds.
pub(crate) fn patience() -> Duration {
    let ms = number("RISER_RSOCKET_PATIENCE").and_then(|ms| u64::try_from(ms).ok());
    let patience = ms.map_or(Duration::from_secs(2), Duration::from_millis);
    patience.min(Duration::from_secs(3600))
}

fn number(name: &str) -> Option<c_int> {
    std::env::var(name).ok()?.trim().parse().ok()
}

/// Sets the options of a new rsocket that the environment has.
pub(crate) fn apply(n: c_int) {
    static SET: OnceLock<Vec<(c_int, c_int)>> = OnceLock::new();
    let set = SET.get_or_init(|| {
        let set = OPTIONS
            .iter()
            .filter_map(|(name, option)| Some((*option, number(name)?)));
        set.filter(|(_, value)| *value > 0).collect()
    });
    for (option, value) in set {
        let at: *const c_void = std::ptr::from_ref(value).cast();
        // SAFETY: the value is alive. Where it is refused, the default stays.
        unsafe { rdma::rsetsockopt(n, SOL_RDMA, *option, at, size_of::<c_int>() as u32) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_rules() {
        let text =
            "# all of it\n\nIperf * STREAM tcp\n* AF_INET6 SOCK_DGRAM *\nx INET\nx IPX * *\n";
        let rules = rules(text);
        assert_eq!(rules.len(), 2);
        let is = |program, domain, kind, protocol| {
            rules
                .iter()
                .any(|r| r.is_about(program, domain, kind, protocol))
        };
        assert!(is("iperf3", libc::AF_INET, libc::SOCK_STREAM, 0));
        assert!(is(
            "iperf3",
            libc::AF_INET,
            libc::SOCK_STREAM,
            libc::IPPROTO_TCP
        ));
        assert!(!is("iperf3", libc::AF_INET, libc::SOCK_DGRAM, 0));
        assert!(!is("nc", libc::AF_INET, libc::SOCK_STREAM, 0));
        assert!(is("nc", libc::AF_INET6, libc::SOCK_DGRAM, 0));
    }
}
