//! Checks for the limits of a backend or an access rule.

use std::time::Duration;

use super::io_limits::{IoLimits, MAX_WAIT};
use super::mistake::{Checked, Mistake};
use super::raw;
use super::yaml::Located;

/// Maximum burst time.
const MAX_BURST: Duration = Duration::from_secs(3600);

pub(super) fn check(path: &str, written: Option<&Located<raw::IoLimits>>) -> Checked<IoLimits> {
    let default = IoLimits::default();
    let Some(Located { value: written, .. }) = written else {
        return Ok(default);
    };
    if let Some(burst) = written.burst.as_ref().filter(|b| b.value.0 > MAX_BURST) {
        let message = "must be at most 1 hour";
        return Err(Mistake::new(
            burst.at,
            format!("{path}.limits.burst"),
            message,
        ));
    }
    Ok(IoLimits {
        iops: written.iops.map(raw::Iops::get),
        read_iops: written.read_iops.map(raw::Iops::get),
        write_iops: written.write_iops.map(raw::Iops::get),
        bandwidth: written.bandwidth.map(raw::Bandwidth::get),
        read_bandwidth: written.read_bandwidth.map(raw::Bandwidth::get),
        write_bandwidth: written.write_bandwidth.map(raw::Bandwidth::get),
        burst: written
            .burst
            .as_ref()
            .map_or(default.burst, |burst| burst.value.0),
    })
}

/// Returns a note if the limits allow a long command to block the commands behind it for too long.
pub(super) fn note(place: &str, limits: &IoLimits, longest: u32) -> Option<String> {
    let rates = [
        limits.bandwidth,
        limits.read_bandwidth,
        limits.write_bandwidth,
    ];
    let seconds = u64::from(longest) / rates.into_iter().flatten().min()?;
    (seconds > MAX_WAIT.as_secs()).then(|| {
        format!(
            "{place}: with this bandwidth, a command of {} MiB (limits.max_transfer) takes \
             {seconds} s, and commands behind it may exceed the timeout of initiators",
            longest >> 20
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Config};

    fn config(backend: &str, rule: &str) -> String {
        format!(
            "backends: {{ d: {{ kind: ram, size: 1MiB, limits: {backend} }} }}\n\
             targets:\n- name: t\n  portals: [{{ protocol: srp, listen: 127.0.0.1 }}]\n  \
             luns: {{ 0: d }}\n  access: [{{ address: 127.0.0.1, limits: {rule} }}]\n"
        )
    }

    #[test]
    fn limits_round_trip() {
        let text = config(
            "{ iops: 5000, read_bandwidth: 100MiB, burst: 2s }",
            "{ write_iops: 10, bandwidth: 1.5MiB, burst: 1500ms }",
        );
        let parsed = Config::parse(&text, "a.yaml").unwrap();
        let unit = IoLimits {
            iops: Some(5000),
            read_bandwidth: Some(100 << 20),
            burst: Duration::from_secs(2),
            ..IoLimits::default()
        };
        let initiator = IoLimits {
            write_iops: Some(10),
            bandwidth: Some(3 << 19),
            burst: Duration::from_millis(1500),
            ..IoLimits::default()
        };
        assert_eq!(parsed.backends[0].limits, unit);
        let Access::Rules(rules) = &parsed.targets[0].access else {
            panic!("there is a rule");
        };
        assert_eq!(rules[0].limits, Some(initiator));
        let again = Config::parse(&parsed.to_yaml(), "b.yaml").unwrap();
        assert_eq!(again, parsed);
        let none = Config::parse(&config("{}", "{ burst: 1m }"), "c.yaml").unwrap();
        assert_eq!(none.backends[0].limits, IoLimits::default());
        assert!(!none.to_yaml().contains("limits"), "{}", none.to_yaml());
    }

    #[test]
    fn invalid_limit_error_has_position() {
        for (limits, place) in [
            ("{ iops: 0 }", "limits.iops"),
            ("{ iops: 2000000000 }", "limits.iops"),
            ("{ write_bandwidth: 4095 }", "limits.write_bandwidth"),
            ("{ burst: 61m }", "limits.burst"),
            ("{ burst: fast }", "fast"),
            ("{ ops: 1 }", "ops"),
        ] {
            let error = Config::parse(&config(limits, "{}"), "a.yaml").unwrap_err();
            assert!(error.to_string().contains(place), "{limits}: {error}");
        }
    }

    #[test]
    fn too_low_bandwidth_adds_note() {
        let text = config("{ read_bandwidth: 1MiB }", "{ bandwidth: 4MiB, iops: 1 }");
        let notes = Config::parse(&text, "a.yaml").unwrap().notes;
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].starts_with("backend `d`: with this bandwidth, a command of 32 MiB"));
        assert!(notes[0].contains("takes 32 s"), "{notes:?}");
        let text = config("{ bandwidth: 4MiB }", "{ write_bandwidth: 2MiB }");
        let notes = Config::parse(&text, "a.yaml").unwrap().notes;
        assert!(notes[0].starts_with("target `t`, access rule 0: "));
        assert_eq!(notes.len(), 1, "{notes:?}");
    }
}
