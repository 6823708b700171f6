//! Selects shared memory for targets on this host, and reports why it can't be used.

use std::io;
use std::net::IpAddr;
use std::thread::available_parallelism;
use std::time::Duration;

use riser_initiator::engine::{Client, ClientBuilder, EngineError};
use riser_initiator::session::{ConnectError, Down, SrpLoginError};
use riser_initiator::url::TargetUrl;
use riser_scsi::iscsi::login::LoginError;
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_transport::shm::{self, Shm, ShmConfig, ShmUsers};

use super::args::{ConnectOptions, ProviderChoice};
use super::exit::{CliError, Exit};

/// Duration of polling after the last work, if each side has a separate processor. This is longer
/// than for a network, because the target needs a system call to wake us up, which is more
/// expensive than sending the rest of a response.
const SPIN: Duration = Duration::from_micros(200);

/// Starts an engine using shared memory for a target, where `target` is the address of its first
/// portal. Returns `None` if shared memory was not specified explicitly and is not supported by the
/// target.
pub(super) fn start(
    url: &TargetUrl,
    target: IpAddr,
    link: &ConnectOptions,
    builder: &ClientBuilder,
) -> Result<Option<Client>, CliError> {
    let is_named = link.provider == ProviderChoice::Shm;
    if link.inject.is_some() {
        let what = "--inject requires the software NIC, which is not used for shared memory";
        return match is_named {
            true => Err(CliError::new(Exit::Usage, what)),
            false => Ok(None),
        };
    }
    let users = shm_users();
    if !is_named && let Err(error) = check_choice(url, |addr| shm::query_listener(addr, &users)) {
        match error.kind() {
            // This is the normal case: the target is on another host, or doesn't support shared
            // memory.
            io::ErrorKind::AddrNotAvailable | io::ErrorKind::ConnectionRefused => {
                tracing::debug!(%target, %error, "shared memory is not available for the target");
            }
            _ => tracing::info!(%target, %error, "shared memory is not available for the target"),
        }
        return Ok(None);
    }
    // When connecting to a local address, the kernel also uses it as the source address.
    let addr = link.addr.or(url.src()).unwrap_or(target);
    let open = move || {
        Shm::open(ShmConfig {
            users,
            ..ShmConfig::new(addr)
        })
    };
    let mut builder = builder.clone();
    if available_parallelism().is_ok_and(|n| n.get() > 1) {
        builder = builder.spin(SPIN);
    }
    match builder.build(open) {
        Ok(client) => {
            tracing::info!(
                device = client.device(),
                "using shared memory with the target (shm)"
            );
            Ok(Some(client))
        }
        Err(error) if is_named => {
            let what = format!("cannot share memory from {addr}");
            let help = "the target must be on this host, and its configuration must contain \
                 `shm: true` or `provider: shm`";
            Err(CliError::new(Exit::NotFound, what)
                .because(error)
                .help(help))
        }
        Err(error) => {
            tracing::info!(%error, "cannot share memory from {addr}");
            Ok(None)
        }
    }
}

/// Checks whether shared memory can be selected automatically. A shared-memory device can't reach
/// other portals, so this must be supported by all of them. `query` is called with the IP address of
/// each portal.
///
/// # Errors
/// Returns errors from [`check_offer`], and [`io::ErrorKind::Unsupported`] if the portals are only
/// known to the target.
fn check_choice(url: &TargetUrl, query: impl Fn(IpAddr) -> io::Result<()>) -> io::Result<()> {
    if url.wants_all() {
        let text = "the target may have portals on other hosts";
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    check_offer(url, query)
}

/// Checks that shared memory is supported by all portals in an address. `query` is called with the IP
/// address of each portal.
///
/// # Errors
/// Returns the first error from `query`. Fails if a portal can't be resolved.
fn check_offer(url: &TargetUrl, query: impl Fn(IpAddr) -> io::Result<()>) -> io::Result<()> {
    let others = url.portals().iter().map(|portal| url.by(portal.clone()));
    let mut queried = Vec::new();
    for portal in std::iter::once(url.first()).chain(others) {
        let addr = portal.resolve()?.ip();
        if !queried.contains(&addr) {
            query(addr)?;
            queried.push(addr);
        }
    }
    Ok(())
}

/// Returns which daemons can share memory with us, in addition to our own and root's: the daemon of
/// the system service.
fn shm_users() -> ShmUsers {
    // System user created by the package.
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    ShmUsers {
        also: user_id(&users, "riser").into_iter().collect(),
    }
}

/// Returns the ID of a user, using the contents of passwd(5).
fn user_id(users: &str, name: &str) -> Option<u32> {
    let mut users = users.lines().map(|line| line.split(':'));
    let mut user = users.find_map(|mut user| (user.next() == Some(name)).then_some(user))?;
    user.nth(1)?.parse().ok()
}

/// Returns whether an engine uses shared memory.
fn is_shared(client: &Client) -> bool {
    client.device().starts_with(shm::PROVIDER)
}

/// Returns whether a login failed because the process that offers shared memory at this address is
/// not serving this target. In this case it's not listening at the port, or has no target with this
/// name.
pub(super) fn is_of_another(client: &Client, error: &EngineError) -> bool {
    let EngineError::Login(Down::Connect(error)) = error else {
        return false;
    };
    let is_refused = matches!(
        error,
        ConnectError::Login(SrpLoginError::Refused(_) | SrpLoginError::Rejected(_))
            | ConnectError::IscsiLogin(LoginError::Refused(LoginStatus::NOT_FOUND))
    );
    is_refused && is_shared(client)
}

/// Returns the reason why shared memory can't be used for a target, if it was selected.
pub(super) fn refusal(client: &Client, url: &TargetUrl) -> Option<String> {
    if !is_shared(client) {
        return None;
    }
    let users = shm_users();
    let reason = check_offer(url, |addr| shm::query_listener(addr, &users)).err()?;
    Some(format!("shared memory is not available: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_requires_all_portals() {
        let url = |text: &str| text.parse::<TargetUrl>().unwrap();
        let two = url("srp://127.0.0.1/0?portal=127.0.0.2");
        let one_of = |shared: &'static [u8]| {
            move |addr: IpAddr| match addr {
                IpAddr::V4(v4) if shared.contains(&v4.octets()[3]) => Ok(()),
                _ => Err(io::ErrorKind::ConnectionRefused.into()),
            }
        };
        check_offer(&two, one_of(&[1, 2])).unwrap();
        for shared in [&[1u8] as &[u8], &[2], &[]] {
            let refused = check_offer(&two, one_of(shared)).unwrap_err();
            assert_eq!(
                refused.kind(),
                io::ErrorKind::ConnectionRefused,
                "{shared:?}"
            );
        }
        check_offer(&two.first(), one_of(&[1])).unwrap();
        let all = url("iser://127.0.0.1/iqn.2026-01.com.example:x/0?paths=all");
        let unknown = check_choice(&all, one_of(&[1, 2])).unwrap_err();
        assert_eq!(unknown.kind(), io::ErrorKind::Unsupported);
        // This isn't the reason why a login using shared memory fails.
        check_offer(&all, one_of(&[1])).unwrap();
        check_choice(&two, one_of(&[1, 2])).unwrap();
    }

    #[test]
    fn user_lookup_matches_whole_name() {
        let users = "root:x:0:0:root:/root:/bin/bash\n\
            riserx:x:7:7::/:/bin/sh\nriser:x:998:997::/var/lib/riser:/usr/sbin/nologin\n";
        assert_eq!(user_id(users, "riser"), Some(998));
        assert_eq!(user_id(users, "rise"), None);
        assert_eq!(user_id("riser:x:many:1::/:", "riser"), None);
    }
}
