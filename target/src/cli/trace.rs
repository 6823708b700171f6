//! `riserd trace`: traces individual commands in a running daemon.

use std::io::Write;
use std::time::Duration;

use hyper::Method;
use riser_admin_api::client::{ApiRequest, PATIENCE};
use riser_admin_api::trace::Wanted;

use super::Failure;
use super::request::{ClientOptions, run_request};
use crate::control::report;

/// Options of `riserd trace`.
#[derive(Debug, clap::Args)]
pub(super) struct Trace {
    /// Only trace commands to this target.
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
    /// Only trace commands to this logical unit number.
    #[arg(long, value_name = "N")]
    lun: Option<u16>,
    /// Only trace commands from initiator ports with this prefix, as shown by `riserd sessions`.
    #[arg(long, value_name = "NAME")]
    initiator: Option<String>,
    /// Only trace commands with this tag, in decimal or with 0x in hexadecimal.
    #[arg(long, value_name = "TAG", value_parser = tag)]
    tag: Option<u64>,
    /// Only trace commands that take at least this time, such as 5ms.
    #[arg(long, value_name = "TIME", value_parser = time)]
    slower_than: Option<Duration>,
    /// Stop after this number of commands.
    #[arg(long, value_name = "N", default_value_t = 100)]
    count: usize,
    /// Stop after this time.
    #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = time)]
    patience: Duration,
    #[command(flatten)]
    options: ClientOptions,
}

/// Requests a trace, and waits for it.
pub(super) fn run(out: &mut dyn Write, trace: &Trace) -> Result<(), Failure> {
    let wanted = Wanted {
        target: trace.target.clone(),
        lun: trace.lun,
        initiator: trace.initiator.clone(),
        tag: trace.tag,
        slower_than: trace.slower_than.unwrap_or_default().as_secs_f64(),
        count: Some(trace.count),
        seconds: Some(trace.patience.as_secs_f64()),
    };
    let body = serde_json::to_string(&wanted).map_err(Failure::run_time)?;
    let question = ApiRequest {
        patience: trace.patience + PATIENCE,
        ..ApiRequest::new(Method::POST, "/v1/trace").with(body)
    };
    run_request(out, &trace.options, question, report::traced)
}

fn tag(text: &str) -> Result<u64, String> {
    let tag = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    tag.map_err(|_| "expected a 64-bit number".to_owned())
}

fn time(text: &str) -> Result<Duration, String> {
    let end = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" => 60.0,
        _ => return Err("expected a number with us, ms, s or m".to_owned()),
    };
    let number: f64 = number.parse().map_err(|_| "invalid number".to_owned())?;
    let time = Duration::try_from_secs_f64(number * unit);
    time.map_err(|_| "invalid time".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_tags_are_parsed() {
        for (text, expected) in [
            ("5ms", Some(5_000)),
            ("250us", Some(250)),
            ("1.5s", Some(1_500_000)),
            ("2", Some(2_000_000)),
            ("1m", Some(60_000_000)),
            ("ms", None),
            ("-1s", None),
            ("1h", None),
        ] {
            assert_eq!(
                time(text).ok().map(|time| time.as_micros()),
                expected,
                "{text}"
            );
        }
        assert_eq!((tag("12"), tag("0x1f")), (Ok(12), Ok(31)));
        assert!(tag("x").is_err() && tag("-1").is_err());
    }
}
