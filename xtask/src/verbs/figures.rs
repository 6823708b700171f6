//! Compares latency and bandwidth of perftest using our library with sockets on the same host.
//!
//! Rounds are interleaved, so that if the machine is slow for some time, this affects all
//! measurements. Ratios always use values from the same round.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::cases::Ready;
use super::runner::{Rig, wait_until_ready};
use crate::bench::stats::{Summary, ratios};
use crate::packages::{ensure, needs};
use crate::{Failure, sh};

/// Server address. The client uses the next address.
const SERVER: &str = "127.0.18.1";
const CLIENT: &str = "127.0.18.2";

/// Message size in bytes, used to measure latency.
const MESSAGE: usize = 8;

/// Number of round trips per measurement, which is the same as in perftest.
const TRIPS: usize = 20_000;

/// Duration of a bandwidth measurement, in seconds.
const SECONDS: u64 = 3;

/// Timeout for a program.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// A perftest program with these options.
    Perftest(&'static str, &'static str),
    /// Two threads that busy-poll UDP sockets.
    Udp,
    /// Two threads that busy-poll a TCP connection.
    Tcp,
    Iperf3,
}

impl How {
    fn name(self) -> String {
        match self {
            Self::Perftest(program, options) => format!("{program} {options}"),
            Self::Udp => format!("UDP ping-pong, {MESSAGE} bytes, spinning"),
            Self::Tcp => format!("TCP ping-pong, {MESSAGE} bytes, spinning"),
            Self::Iperf3 => format!("iperf3 -l 64K -t {SECONDS}"),
        }
    }

    /// Runs the measurement. Returns either the median of half the round trip time in microseconds,
    /// or the bandwidth in 10⁹ bytes per second.
    fn measure(self, rig: &Rig) -> Result<f64, Failure> {
        match self {
            Self::Perftest(program, options) => perftest(rig, program, options),
            Self::Udp => Ok(udp(TRIPS)?),
            Self::Tcp => Ok(tcp(TRIPS)?),
            Self::Iperf3 => iperf3(),
        }
    }
}

/// Two methods to compare, and the target for their ratio if there is one.
struct Comparison {
    ours: How,
    theirs: How,
    unit: &'static str,
    goal: Option<Goal>,
}

#[derive(Clone, Copy)]
enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

impl Goal {
    fn describe(self, ratio: f64) -> String {
        let (is_met, goal) = match self {
            Self::AtLeast(least) => (ratio >= least, format!("at least {least}")),
            Self::AtMost(most) => (ratio <= most, format!("at most {most}")),
        };
        format!("{goal}: {}", if is_met { "met" } else { "missed" })
    }
}

fn comparisons() -> Vec<Comparison> {
    let latency = |ours, theirs, goal| Comparison {
        ours,
        theirs,
        unit: "µs",
        goal,
    };
    let bandwidth = |program, goal| Comparison {
        ours: How::Perftest(program, "-s 65536 -D 3"),
        theirs: How::Iperf3,
        unit: "GB/s",
        goal,
    };
    vec![
        bandwidth("ib_write_bw", Some(Goal::AtLeast(0.8))),
        bandwidth("ib_read_bw", None),
        bandwidth("ib_send_bw", None),
        latency(
            How::Perftest("ib_send_lat", "-s 8 -n 20000"),
            How::Udp,
            Some(Goal::AtMost(1.5)),
        ),
        latency(
            How::Perftest("ib_send_lat", "-s 8 -n 20000"),
            How::Tcp,
            None,
        ),
        latency(
            How::Perftest("ib_send_lat", "-s 8 -n 20000 -e"),
            How::Udp,
            None,
        ),
        latency(
            How::Perftest("ib_write_lat", "-s 8 -n 20000"),
            How::Udp,
            None,
        ),
        latency(
            How::Perftest("ib_read_lat", "-s 8 -n 20000"),
            How::Udp,
            None,
        ),
    ]
}

/// Runs the given number of rounds and prints a table.
pub(super) fn run(rig: &Rig, rounds: usize) -> Result<(), Failure> {
    let missing = ensure(needs("verbs-figures"));
    if let Some(need) = missing.first() {
        return Err(format!("{} is missing", need.program).into());
    }
    let comparisons = comparisons();
    let mut hows: Vec<How> = Vec::new();
    for how in comparisons.iter().flat_map(|c| [c.ours, c.theirs]) {
        if !hows.contains(&how) {
            hows.push(how);
        }
    }
    let mut figures: Vec<Vec<(usize, f64)>> = vec![Vec::new(); hows.len()];
    for round in 0..rounds {
        for (how, figures) in hows.iter().zip(&mut figures) {
            let figure = how
                .measure(rig)
                .map_err(|e| format!("{}: {e}", how.name()))?;
            println!("round {}: {}: {figure:.2}", round + 1, how.name());
            figures.push((round, figure));
        }
    }
    let of = |how: How| {
        let at = hows.iter().position(|other| *other == how);
        at.map(|at| figures[at].as_slice()).unwrap_or_default()
    };
    println!("\n| program | median | beside | median | ratio (least to most) | goal |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for comparison in &comparisons {
        println!(
            "{}",
            row(comparison, of(comparison.ours), of(comparison.theirs))?
        );
    }
    Ok(())
}

fn row(
    comparison: &Comparison,
    ours: &[(usize, f64)],
    theirs: &[(usize, f64)],
) -> Result<String, Failure> {
    let unit = comparison.unit;
    let median = |figures: &[(usize, f64)]| {
        let figures: Vec<_> = figures.iter().map(|(_, figure)| *figure).collect();
        Summary::of(&figures).map(|summary| summary.median)
    };
    let ratio = Summary::of(&ratios(ours, theirs));
    let (Some(own), Some(other), Some(ratio)) = (median(ours), median(theirs), ratio) else {
        return Err("missing round".into());
    };
    let goal = comparison.goal.map(|goal| goal.describe(ratio.median));
    Ok(format!(
        "| `{}` | {own:.2} {unit} | {} | {other:.2} {unit} | {:.2} ({:.2} to {:.2}) | {} |",
        comparison.ours.name(),
        comparison.theirs.name(),
        ratio.median,
        ratio.min,
        ratio.max,
        goal.as_deref().unwrap_or("none"),
    ))
}

fn perftest(rig: &Rig, program: &str, options: &str) -> Result<f64, Failure> {
    let words: Vec<_> = [program].into_iter().chain(options.split(' ')).collect();
    let log = format!("figures.{program}");
    let start = |addr, words: &[&str], end| {
        let command = rig.command(addr, &[], words);
        rig.start(command, &format!("{log}.{end}"))
    };
    let mut server = start(SERVER, &words, "server")?;
    wait_until_ready(&mut server, &Ready::Port, SERVER, PERFTEST_PORT)?;
    let words: Vec<_> = words.into_iter().chain([SERVER]).collect();
    let mut client = start(CLIENT, &words, "client")?;
    let until = Instant::now() + PATIENCE;
    let (client, server) = (client.finish(until), server.finish(until));
    for ended in [&client, &server] {
        if !ended.status.is_some_and(|status| status.success()) {
            return Err(format!("{program} failed: {}", ended.said).into());
        }
    }
    figure_of(&client.said).ok_or_else(|| format!("missing result in {}", client.said).into())
}

/// TCP port used by perftest for its own connection.
const PERFTEST_PORT: &str = "18515";

/// Parses the result from perftest's table: the typical latency in microseconds, or the average
/// bandwidth in 10⁹ bytes per second.
fn figure_of(said: &str) -> Option<f64> {
    let mut lines = said.lines();
    let title = lines.find(|line| line.trim_start().starts_with("#bytes"))?;
    let numbers: Vec<f64> = lines
        .next()?
        .split_whitespace()
        .map_while(|word| word.parse().ok())
        .collect();
    match title {
        title if title.contains("BW average[MB/sec]") => {
            numbers.get(3).map(|mib| mib * f64::from(1 << 20) / 1e9)
        }
        title if title.contains("t_typical[usec]") => numbers.get(4).copied(),
        _ => None,
    }
}

/// Returns the bandwidth of a single TCP connection, in 10⁹ bytes per second.
fn iperf3() -> Result<f64, Failure> {
    let port = TcpListener::bind((SERVER, 0))?
        .local_addr()?
        .port()
        .to_string();
    let mut server = sh::cmd("iperf3", ["-s", "-1", "-B", SERVER, "-p", &port])
        .stdout(std::process::Stdio::null())
        .spawn()?;
    thread::sleep(Duration::from_millis(500));
    let seconds = SECONDS.to_string();
    let args = ["-c", SERVER, "-p", &port, "-l", "64K", "-t", &seconds, "-J"];
    let output = sh::output(&mut sh::cmd("iperf3", args));
    if output.is_err() {
        let _ = server.kill();
    }
    server.wait()?;
    let document: Value = serde_json::from_str(&output?)?;
    let bits = document["end"]["sum_received"]["bits_per_second"].as_f64();
    let bits = bits.ok_or("iperf3 printed no result")?;
    Ok(bits / 8e9)
}

/// Returns the median of half the UDP round trip time, in microseconds.
fn udp(trips: usize) -> io::Result<f64> {
    let (near, far) = (UdpSocket::bind((CLIENT, 0))?, UdpSocket::bind((SERVER, 0))?);
    near.connect(far.local_addr()?)?;
    far.connect(near.local_addr()?)?;
    near.set_nonblocking(true)?;
    far.set_nonblocking(true)?;
    ping_pong(
        trips,
        |message| near.send(message).map(drop),
        |message| near.recv(message),
        |message| far.send(message).map(drop),
        |message| far.recv(message),
    )
}

/// Returns the median of half the TCP round trip time, in microseconds.
fn tcp(trips: usize) -> io::Result<f64> {
    let listener = TcpListener::bind((SERVER, 0))?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    ping_pong(
        trips,
        |message| (&near).write_all(message),
        |message| (&near).read(message),
        |message| (&far).write_all(message),
        |message| (&far).read(message),
    )
}

fn ping_pong(
    trips: usize,
    send: impl Fn(&[u8]) -> io::Result<()>,
    receive: impl Fn(&mut [u8]) -> io::Result<usize>,
    send_back: impl Fn(&[u8]) -> io::Result<()> + Send,
    receive_there: impl Fn(&mut [u8]) -> io::Result<usize> + Send,
) -> io::Result<f64> {
    let message = [1; MESSAGE];
    thread::scope(|scope| {
        let other = scope.spawn(move || {
            for _ in 0..trips {
                spin(&receive_there)?;
                send_back(&message)?;
            }
            Ok::<_, io::Error>(())
        });
        let mut halves = Vec::with_capacity(trips);
        for _ in 0..trips {
            let began = Instant::now();
            send(&message)?;
            spin(&receive)?;
            halves.push(began.elapsed().as_secs_f64() * 1e6 / 2.0);
        }
        other
            .join()
            .map_err(|_| io::Error::other("the peer panicked"))??;
        let summary = Summary::of(&halves).map(|summary| summary.median);
        summary.ok_or_else(|| io::Error::other("no round trip completed"))
    })
}

/// Receives a full message without blocking.
fn spin(receive: &impl Fn(&mut [u8]) -> io::Result<usize>) -> io::Result<()> {
    let began = Instant::now();
    let mut taken = 0;
    while taken < MESSAGE {
        match receive(&mut [0; MESSAGE][taken..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => taken += n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if began.elapsed() > PATIENCE {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    \
        t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] \n \
        8       20000          8.94           235839.58      16.11               456.03  1.0 2.0 3.0\n";
    const BANDWIDTH: &str = "---\n #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   \
        MsgRate[Mpps]\n 65536      20000            0.00               1000.00            0.016\n";

    #[test]
    fn perftest_tables_are_parsed() {
        assert_eq!(figure_of(LATENCY), Some(16.11));
        assert_eq!(figure_of(BANDWIDTH), Some(1.048_576));
        assert_eq!(figure_of("no table"), None);
        assert_eq!(figure_of(" #bytes something\n 1 2 3 4 5\n"), None);
    }

    #[test]
    fn row_contains_medians_and_ratio() {
        let comparison = &comparisons()[0];
        let ours = [(0, 2.0), (1, 1.0), (2, 3.0)];
        let theirs = [(0, 2.0), (1, 2.0), (2, 2.0)];
        let text = row(comparison, &ours, &theirs).unwrap();
        assert!(
            text.contains("| 2.00 GB/s | iperf3 -l 64K -t 3 | 2.00 GB/s | 1.00 (0.50 to 1.50) |")
        );
        assert!(text.ends_with("| at least 0.8: met |"), "{text}");
        assert!(row(comparison, &[], &theirs).is_err());
    }

    #[test]
    fn messages_go_back_and_forth() {
        assert!(udp(10).unwrap() > 0.0 && tcp(10).unwrap() > 0.0);
    }
}
