//! Shows the daemon's activity in a terminal: `riserd top`.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use hyper::Method;
use riser_admin_api::client::{self, ApiRequest, ClientError};
use riser_admin_api::live::Live;
use riser_admin_api::rates::{OpRate, Rates, rates};
use riser_admin_api::view::target_label;

/// Display options.
#[derive(Clone, Copy, Debug)]
pub struct Top {
    /// Refresh interval.
    pub every: Duration,
    /// Show one interval and exit.
    pub once: bool,
    /// Use JSON, with one document per line.
    pub json: bool,
    /// Number of columns and rows of the terminal. `None` if the output is not a terminal, in which
    /// case we don't use control sequences.
    pub terminal: Option<(usize, usize)>,
}

/// Reason why the display stopped.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// The daemon is not available.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The output failed.
    #[error(transparent)]
    Output(#[from] io::Error),
}

/// Polls the daemon on this socket, and shows its activity until it does not respond.
///
/// # Errors
/// See [`TopError`].
pub fn run(socket: &Path, top: &Top, out: &mut dyn Write) -> Result<(), TopError> {
    let look = || client::call::<Live>(socket, ApiRequest::new(Method::GET, "/v1/live"));
    let mut old = look()?;
    loop {
        std::thread::sleep(top.every);
        let new = look()?;
        let rates = rates(&old, &new);
        if top.json {
            writeln!(
                out,
                "{}",
                serde_json::to_string(&rates).map_err(io::Error::other)?
            )?;
        } else {
            draw(out, &screen(&rates), top)?;
        }
        out.flush()?;
        if top.once {
            return Ok(());
        }
        old = new;
    }
}

/// Overwrites the previous output to avoid flickering.
fn draw(out: &mut dyn Write, lines: &[String], top: &Top) -> io::Result<()> {
    let Some((columns, rows)) = top.terminal.filter(|_| !top.once) else {
        return writeln!(out, "{}", lines.join("\n"));
    };
    let mut text = String::from("\x1b[H");
    for line in lines.iter().take(rows.saturating_sub(1)) {
        text.extend(line.chars().take(columns));
        text.push_str("\x1b[K\r\n");
    }
    text.push_str("\x1b[J");
    out.write_all(text.as_bytes())
}

fn screen(rates: &Rates) -> Vec<String> {
    let busy = rates.busy.iter().map(|b| format!("{:3.0}%", b * 100.0));
    let mut lines = vec![
        format!(
            "riserd {}  up {}  {} session(s)  workers {}  {:.0} retransmits/s",
            rates.version,
            uptime(rates.uptime),
            rates.nexuses,
            busy.collect::<Vec<_>>().join(" "),
            rates.retransmits
        ),
        format!("total  {}", op(&rates.total)),
    ];
    // Names come from initiators and from the configuration, so we must remove control characters
    // before writing them to a terminal.
    if let Some(missing) = &rates.missing {
        lines.extend(
            missing
                .lines()
                .map(|line| format!("NOT READY: {}", clean(line))),
        );
    }
    lines.push(String::new());
    lines.push(format!(
        "{:20} {:>5} {:>5} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>7}",
        "TARGET",
        "LUN",
        "QUEUE",
        "READ/s",
        "WRITE/s",
        "COMMAND/s",
        "BYTE/s",
        "p50",
        "p99",
        "ERROR/s"
    ));
    lines.extend(rates.luns.iter().map(|lun| {
        format!(
            "{:20} {:>5} {:>5} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>7}",
            clean(&lun.target),
            lun.lun,
            lun.queue_depth,
            amount(lun.read.commands),
            amount(lun.write.commands),
            amount(lun.total.commands),
            amount(lun.total.bytes),
            time(lun.total.p50),
            time(lun.total.p99),
            amount(lun.errors)
        )
    }));
    lines.push(String::new());
    lines.push(format!(
        "{:8} {:20} {:>5} {:>9} {:>9}  {:22} INITIATOR",
        "PROTOCOL", "TARGET", "QUEUE", "COMMAND/s", "BYTE/s", "PEER"
    ));
    lines.extend(rates.sessions.iter().map(|session| {
        format!(
            "{:8} {:20} {:>5} {:>9} {:>9}  {:22} {}",
            session.protocol,
            clean(target_label(&session.target)),
            session.in_flight,
            amount(session.commands),
            amount(session.bytes),
            session.peer,
            clean(&session.initiator)
        )
    }));
    lines
}

fn op(op: &OpRate) -> String {
    format!(
        "{} commands/s  {} bytes/s  mean {}  p50 {}  p99 {}",
        amount(op.commands),
        amount(op.bytes),
        time(op.mean),
        time(op.p50),
        time(op.p99)
    )
}

/// Removes terminal control characters from a name.
fn clean(name: &str) -> String {
    name.replace(char::is_control, "?")
}

/// Formats a number with a decimal prefix, using at most seven characters.
fn amount(n: f64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    match units.iter().find(|(unit, _)| n >= *unit) {
        Some((unit, letter)) => format!("{:.1}{letter}", n / unit),
        None if n > 0.0 && n < 10.0 => format!("{n:.1}"),
        None => format!("{n:.0}"),
    }
}

fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(s) if s < 1e-3 => format!("{:.0}us", s * 1e6),
        Some(s) if s < 1.0 => format!("{:.1}ms", s * 1e3),
        Some(s) => format!("{s:.1}s"),
    }
}

fn uptime(seconds: f64) -> String {
    let minutes = seconds as u64 / 60;
    match minutes {
        0 => format!("{seconds:.0} s"),
        1..60 => format!("{minutes} min"),
        60..2880 => format!("{} h {} min", minutes / 60, minutes % 60),
        _ => format!("{} days", minutes / 1440),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_admin_api::rates::{LunRate, SessionRate};

    fn rates() -> Rates {
        Rates {
            luns: vec![LunRate {
                target: "demo".into(),
                total: OpRate {
                    commands: 12_345.0,
                    bytes: 5e7,
                    mean: Some(90e-6),
                    p50: Some(66e-6),
                    p99: Some(0.0042),
                },
                ..LunRate::default()
            }],
            sessions: vec![SessionRate {
                initiator: "evil\x1b[2J".into(),
                ..SessionRate::default()
            }],
            missing: Some("target demo: nobody listens".into()),
            ..Rates::default()
        }
    }

    #[test]
    fn screen_lists_all_and_escapes_names() {
        let text = screen(&rates()).join("\n");
        for part in [
            "12.3k",
            "50.0M",
            "66us",
            "4.2ms",
            "NOT READY: target demo",
            "evil?[2J",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains('\x1b'));
    }

    #[test]
    fn output_is_limited_to_terminal_size() {
        let top = |once, terminal| Top {
            every: Duration::ZERO,
            once,
            json: false,
            terminal,
        };
        let drawn = |top: Top| {
            let mut out = Vec::new();
            draw(&mut out, &screen(&rates()), &top).unwrap();
            String::from_utf8(out).unwrap()
        };
        let text = drawn(top(false, Some((10, 4))));
        assert_eq!(text.matches("\r\n").count(), 3);
        assert!(text.starts_with("\x1b[Hriserd "), "{text:?}");
        assert!(!drawn(top(true, Some((10, 4)))).contains('\x1b'));
        assert!(!drawn(top(false, None)).contains('\x1b'));
    }
}
