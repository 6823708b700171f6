//! `riser vnic`: an interface of a virtual Ethernet over the software NIC.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use riser_fabric::vnic::VeswConfig;
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::args::Global;
use super::exit::{CliError, Exit};
use super::output;
use super::vnic_args::VnicArgs;
use crate::vnic::{Config, Manage, Node, VnicError};

/// Groups of members that name none: administratively scoped (RFC 2365 6.1, RFC 4291 2.7).
const GROUPS: [&str; 2] = ["239.255.86.78", "ff15::564e"];

#[derive(Serialize)]
struct Document {
    interface: String,
    sent: u64,
    received: u64,
    send_errors: u64,
    receive_errors: u64,
}

/// Serves the interface until a signal.
pub(super) fn run(args: &VnicArgs, global: &Global) -> Result<(), CliError> {
    let config = config(args)?;
    let wake = signals().map_err(|e| CliError::io("cannot handle signals", e))?;
    let mut node = Node::open(&config).map_err(|e| failed(e, &config))?;
    let mut text = [0; 1];
    loop {
        node.turn(wake.as_fd()).map_err(|e| failed(e, &config))?;
        if matches!(io::Read::read(&mut &wake, &mut text), Ok(1..)) {
            break;
        }
    }
    node.leave();
    let report = node.report();
    let document = Document {
        interface: node.interface().to_owned(),
        sent: report.sent,
        received: report.received,
        send_errors: report.send_errors,
        receive_errors: report.receive_errors,
    };
    output::result(&document, global, |out| {
        writeln!(
            out,
            "{}: {} frames sent, {} received; {} not sent, {} packets dropped",
            document.interface,
            document.sent,
            document.received,
            document.send_errors,
            document.receive_errors
        )
    })
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
            return usage(format!("{other} is not of the family of {}", args.addr));
        }
    }
    if args.manage && args.dead_after <= args.interval {
        return usage("members would be forgotten before they are asked once more".into());
    }
    if args.manage && args.interval < Duration::from_millis(100) {
        return usage("the interval is shorter than 100 ms".into());
    }
    Ok(Config {
        addr: args.addr,
        group,
        name: args.name.clone(),
        mac: args.mac,
        manager: args.manager,
        manage: args.manage.then(|| Manage {
            vesw: VeswConfig::new(args.switch, args.mtu),
            interval: args.interval,
            dead_after: args.dead_after,
        }),
    })
}

/// A descriptor that becomes readable at a signal to end.
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
            let help = match e.kind() {
                io::ErrorKind::PermissionDenied if is_interface => {
                    Some("making an interface takes root, or CAP_NET_ADMIN".to_owned())
                }
                io::ErrorKind::NotFound if is_interface => {
                    Some("`modprobe tun` makes /dev/net/tun".to_owned())
                }
                io::ErrorKind::AddrNotAvailable => Some(format!(
                    "`ip address` shows which addresses this host has; {} is none",
                    config.addr
                )),
                io::ErrorKind::AddrInUse => Some(
                    "another program has a software NIC there; one address serves one program"
                        .to_owned(),
                ),
                _ => None,
            };
            let exit = match e.kind() {
                io::ErrorKind::InvalidInput => Exit::Usage,
                io::ErrorKind::AddrInUse | io::ErrorKind::ResourceBusy => Exit::Busy,
                _ => Exit::Failure,
            };
            (exit, help)
        }
        VnicError::Interface(_, e)
            if matches!(e.raw_os_error(), Some(libc::EBADFD | libc::ENODEV)) =>
        {
            let help = format!("{} was deleted", config.name);
            (Exit::NotFound, Some(help))
        }
        _ => (Exit::Failure, None),
    };
    let error = CliError::new(
        exit,
        format!("{} is no interface of a virtual Ethernet", config.name),
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
    fn a_member_has_a_group_of_its_family() {
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
        ] {
            assert_eq!(of(wrong).unwrap_err().exit, Exit::Usage, "{wrong:?}");
        }
    }

    #[test]
    fn what_only_a_manager_decides_is_refused_of_others() {
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
