//! `riser vnic`: network interfaces of virtual Ethernets over the software NIC.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use riser_fabric::vnic::VeswConfig;
use riser_fabric::vnic::vema::OWNER_TIMEOUT;
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::args::Global;
use super::exit::{CliError, Exit};
use super::output;
use super::vnic_args::VnicArgs;
use crate::vnic::{Config, Manage, Node, VnicError};

/// Default multicast groups. These are administratively scoped (RFC 2365 6.1, RFC 4291 2.7).
const GROUPS: [&str; 2] = ["239.255.86.78", "ff15::564e"];
/// Maximum number of interfaces of a member and switches of a manager.
const MAX_INTERFACES: usize = 16;
/// Maximum interval between two searches. This is half of the time after which members select
/// another manager.
const MAX_INTERVAL: Duration = OWNER_TIMEOUT.checked_div(2).unwrap();

#[derive(Serialize)]
struct Document {
    interfaces: Vec<Interface>,
}

#[derive(Serialize)]
struct Interface {
    name: String,
    sent: u64,
    received: u64,
    send_errors: u64,
    receive_errors: u64,
}

/// Serves the interfaces until a signal is received.
pub(super) fn run(args: &VnicArgs, global: &Global) -> Result<(), CliError> {
    let config = config(args)?;
    let wake = signals().map_err(|e| CliError::io("cannot handle signals", e))?;
    let mut node = Node::open(&config).map_err(|e| failed(e, &config))?;
    let mut text = [0; 1];
    loop {
        node.run_once(wake.as_fd())
            .map_err(|e| failed(e, &config))?;
        if matches!(io::Read::read(&mut &wake, &mut text), Ok(1..)) {
            break;
        }
    }
    node.notify_leaving();
    let interfaces = node.reports().into_iter().map(|report| Interface {
        name: report.interface,
        sent: report.sent,
        received: report.received,
        send_errors: report.send_errors,
        receive_errors: report.receive_errors,
    });
    let document = Document {
        interfaces: interfaces.collect(),
    };
    output::result(&document, global, |out| {
        document.interfaces.iter().try_for_each(|interface| {
            writeln!(
                out,
                "{}: {} frames sent, {} received; {} not sent, {} packets dropped",
                interface.name,
                interface.sent,
                interface.received,
                interface.send_errors,
                interface.receive_errors
            )
        })
    })
}

fn has_repetition<T: PartialEq>(values: &[T]) -> bool {
    let mut all = values.iter().enumerate();
    all.any(|(n, value)| values[..n].contains(value))
}

fn config(args: &VnicArgs) -> Result<Config, CliError> {
    let usage = |text: String| Err(CliError::new(Exit::Usage, text));
    let [v4, v6] = GROUPS;
    let usual = if args.addr.is_ipv4() { v4 } else { v6 };
    let group = args.group.map_or_else(|| usual.parse().ok(), Some);
    let Some(group) = group.filter(IpAddr::is_multicast) else {
        return usage("the group is not a multicast address".into());
    };
    for other in [Some(group), args.manager].into_iter().flatten() {
        if other.is_ipv4() != args.addr.is_ipv4() {
            return usage(format!(
                "{other} has another address family than {}",
                args.addr
            ));
        }
    }
    if args.manage && args.dead_after <= args.interval {
        return usage(
            "members would be removed before the next query: --dead-after must exceed --interval"
                .into(),
        );
    }
    if args.manage && args.interval < Duration::from_millis(100) {
        return usage("the interval is shorter than 100 ms".into());
    }
    if args.manage && args.interval > MAX_INTERVAL {
        return usage(
            "the interval is longer than 5 s, and members select another manager after 10 s".into(),
        );
    }
    if has_repetition(&args.name) {
        return usage("duplicate interface name".into());
    }
    if args.name.len() > MAX_INTERFACES || args.switch.len() > MAX_INTERFACES {
        return usage(format!(
            "too many interfaces or switches: the limit is {MAX_INTERFACES}"
        ));
    }
    if has_repetition(&args.switch) {
        return usage("duplicate switch number".into());
    }
    let mtus = match *args.mtu {
        [mtu] => vec![mtu; args.switch.len()],
        _ if args.mtu.len() == args.switch.len() => args.mtu.clone(),
        _ => return usage("set one MTU for all switches, or one for each".into()),
    };
    let vesws = args.switch.iter().zip(mtus);
    let vesws = vesws.map(|(switch, mtu)| VeswConfig::new(*switch, mtu));
    Ok(Config {
        addr: args.addr,
        group,
        names: args.name.clone(),
        mac: args.mac,
        manager: args.manager,
        manage: args.manage.then(|| Manage {
            vesws: vesws.collect(),
            interval: args.interval,
            dead_after: args.dead_after,
        }),
    })
}

/// Returns a descriptor that becomes readable when a termination signal is received.
fn signals() -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    Ok(read)
}

fn failed(error: VnicError, config: &Config) -> CliError {
    let (exit, help) = match &error {
        VnicError::Create(_, e) | VnicError::Device(_, e) => {
            let is_interface = matches!(error, VnicError::Create(..));
            let is_missing = e.kind() == io::ErrorKind::NotFound
                || matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENXIO));
            let help = match e.kind() {
                io::ErrorKind::PermissionDenied if is_interface => {
                    Some("creating an interface requires root or CAP_NET_ADMIN".to_owned())
                }
                _ if is_interface && is_missing => {
                    Some("run `modprobe tun` to create /dev/net/tun".to_owned())
                }
                io::ErrorKind::ResourceBusy if is_interface => Some(
                    "an interface with this name exists; use `--name` to set another".to_owned(),
                ),
                io::ErrorKind::AddrNotAvailable => Some(format!(
                    "{} is not an address of this host; use `ip address` to list them",
                    config.addr
                )),
                io::ErrorKind::AddrInUse => {
                    Some("another process has a software NIC at this address".to_owned())
                }
                _ => None,
            };
            let exit = match e.kind() {
                io::ErrorKind::InvalidInput => Exit::Usage,
                io::ErrorKind::AddrInUse | io::ErrorKind::ResourceBusy => Exit::Busy,
                _ => Exit::Failure,
            };
            (exit, help)
        }
        VnicError::Interface(name, e)
            if matches!(e.raw_os_error(), Some(libc::EBADFD | libc::ENODEV)) =>
        {
            let help = format!("{name} was deleted, or moved to another network namespace");
            (Exit::NotFound, Some(help))
        }
        _ => (Exit::Failure, None),
    };
    let error = CliError::new(
        exit,
        format!(
            "cannot join a virtual Ethernet with {}",
            config.names.join(", ")
        ),
    )
    .because(error);
    match help {
        Some(help) => error.help(help),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::args::{Args, Verb};
    use super::*;

    fn args(words: &[&str]) -> VnicArgs {
        let words = ["riser", "vnic", "--addr"].iter().chain(words);
        let args = Args::try_parse_from(words).unwrap();
        let Verb::Vnic(args) = args.verb else {
            panic!("{args:?}");
        };
        args
    }

    #[test]
    fn default_group_matches_address_family() {
        let of = |words: &[&str]| config(&args(words)).map(|c| c.group.to_string());
        assert_eq!(of(&["192.0.2.1"]).unwrap(), GROUPS[0]);
        assert_eq!(of(&["2001:db8::1"]).unwrap(), GROUPS[1]);
        assert_eq!(
            of(&["192.0.2.1", "--group", "239.1.2.3"]).unwrap(),
            "239.1.2.3"
        );
        for wrong in [
            &["192.0.2.1", "--group", "ff15::1"][..],
            &["192.0.2.1", "--group", "192.0.2.2"],
            &["192.0.2.1", "--manager", "2001:db8::1"],
            &["192.0.2.1", "--manage", "--dead-after", "1s"],
            &["192.0.2.1", "--manage", "--interval", "50ms"],
            &[
                "192.0.2.1",
                "--manage",
                "--interval",
                "6s",
                "--dead-after",
                "9s",
            ],
        ] {
            assert_eq!(of(wrong).unwrap_err().exit, Exit::Usage, "{wrong:?}");
        }
    }

    #[test]
    fn mtu_is_shared_or_per_switch() {
        let switches = |words: &[&str]| {
            let manage = ["192.0.2.1", "--manage"];
            let words: Vec<_> = manage.iter().chain(words).copied().collect();
            let config = config(&args(&words)).map_err(|e| e.exit);
            config.map(|config| {
                let vesws = config.manage.unwrap().vesws.into_iter();
                vesws.map(|v| (v.vesw_id, v.eth_mtu)).collect::<Vec<_>>()
            })
        };
        assert_eq!(switches(&[]), Ok(vec![(1, 1500)]));
        let two = ["--switch", "7", "--switch", "9", "--mtu", "4000"];
        assert_eq!(switches(&two), Ok(vec![(7, 4000), (9, 4000)]));
        let each = [&two[..], &["--mtu", "9000"]].concat();
        assert_eq!(switches(&each), Ok(vec![(7, 4000), (9, 9000)]));
        let wrong = [&each[..], &["--mtu", "9000"]].concat();
        assert_eq!(switches(&wrong), Err(Exit::Usage));
        assert_eq!(
            switches(&["--switch", "3", "--switch", "3"]),
            Err(Exit::Usage)
        );
        assert_eq!(switches(&["--name", "a", "--name", "a"]), Err(Exit::Usage));
    }

    #[test]
    fn manager_options_require_manage() {
        let parse = |words: &[&str]| {
            let start = ["riser", "vnic", "--addr", "192.0.2.1"];
            Args::try_parse_from(start.iter().chain(words)).is_ok()
        };
        assert!(parse(&["--manage", "--mtu", "9000", "--switch", "4095"]));
        assert!(!parse(&["--mtu", "9000"]));
        assert!(!parse(&["--manage", "--mtu", "1279"]));
        assert!(!parse(&["--manage", "--mtu", "9217"]));
        assert!(!parse(&["--manage", "--switch", "0"]));
        assert!(!parse(&["--manage", "--switch", "4096"]));
    }
}
