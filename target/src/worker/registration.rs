//! Registration of a port with a subnet administrator, so that hosts find it by its capabilities.
//!
//! ```text
//!       poll            response, or none after retries           renewal is due
//!  Due ──────▶ Pending ─────────────────────────────────▶ Waiting ──────────────▶ Pending
//! ```
//!
//! The administrator may be started later or restarted without its state, so the registration is
//! repeated at a fixed interval even after a failure.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use riser_fabric::sa::client::{ClientConfig, Request, SaClient, SaError, SaEvent, SaResponse};
use riser_fabric::sa::wire::node::PortInfoRecord;
use riser_transport::verbs::{Gid, PortCapabilities};
use riser_transport::wire::Mad;

/// Interval between requests. The administrator forgets a port after five of them.
const RENEWAL: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The first request has not been sent yet.
    Due,
    /// A request has no response yet.
    Pending,
    /// The next request is sent at this time.
    Waiting(Instant),
}

/// Registration of a port.
#[derive(Debug)]
pub(super) struct Registration {
    administrator: IpAddr,
    capabilities: PortCapabilities,
    client: SaClient,
    state: State,
    /// Result of the last request, used to log changes only. `None` before the first response.
    is_registered: Option<bool>,
}

impl Registration {
    /// Creates the registration. `first` is a random number for transactions.
    pub(super) fn new(administrator: IpAddr, capabilities: PortCapabilities, first: u32) -> Self {
        Self {
            administrator,
            capabilities,
            client: SaClient::new(ClientConfig::new(administrator.into()), first),
            state: State::Due,
            is_registered: None,
        }
    }

    /// Returns the address of the administrator.
    pub(super) fn administrator(&self) -> IpAddr {
        self.administrator
    }

    /// Handles a MAD of subnet administration.
    pub(super) fn handle_mad(&mut self, now: Instant, from: Gid, mad: &[u8]) {
        self.client.handle_mad(now, from, mad);
        self.complete(now);
    }

    /// Returns the time of the next call to [`Self::poll`]. `None` if it has not been called yet.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Due => None,
            State::Pending => self.client.poll_timeout(),
            State::Waiting(until) => Some(until),
        }
    }

    /// Returns the next MAD to send.
    pub(super) fn poll(&mut self, now: Instant) -> Option<Mad> {
        let is_due = match self.state {
            State::Due => true,
            State::Pending => false,
            State::Waiting(until) => until <= now,
        };
        if is_due {
            // There is no other query, so there is always room for it.
            let _ = self.client.query(now, Request::set_port(self.capabilities));
            self.state = State::Pending;
        }
        self.client.handle_timeout(now);
        self.complete(now);
        self.client.poll_transmit()
    }

    fn complete(&mut self, now: Instant) {
        while let Some(event) = self.client.poll_event() {
            if let SaEvent::Completed { result, .. } = event {
                self.state = State::Waiting(now + RENEWAL);
                self.report(result);
            }
        }
    }

    fn report(&mut self, result: Result<SaResponse, SaError>) {
        let is_registered = result.is_ok();
        if self.is_registered.replace(is_registered) == Some(is_registered) {
            return;
        }
        let administrator = self.administrator;
        match result {
            Ok(response) => {
                let port = response.record::<PortInfoRecord>();
                let lid = port.map_or(0, |port| port.lid.get());
                tracing::info!(%administrator, lid, "registered the port with the subnet administrator");
            }
            Err(error) => {
                tracing::warn!(%administrator, %error, "cannot register the port with the subnet administrator");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use riser_fabric::sa::administrator::{Administrator, AdministratorConfig};
    use riser_transport::verbs::Mtu;

    use super::*;

    const ADMINISTRATOR: [u8; 4] = [10, 0, 0, 1];
    const DM: PortCapabilities = PortCapabilities::DEVICE_MANAGEMENT;

    fn registration() -> Registration {
        Registration::new(ADMINISTRATOR.into(), DM, 7)
    }

    /// Exchanges all MADs between the port at 10.0.0.2 and the administrator.
    fn exchange(now: Instant, port: &mut Registration, administrator: &mut Administrator) -> usize {
        let (host, mut sent) = (Gid::from(IpAddr::from([10, 0, 0, 2])), 0);
        loop {
            let before = sent;
            while let Some(mad) = port.poll(now) {
                sent += 1;
                administrator.handle_mad(now, host, &mad);
            }
            while let Some((to, mad)) = administrator.poll_transmit(now) {
                assert_eq!(to, host);
                port.handle_mad(now, IpAddr::from(ADMINISTRATOR).into(), &mad);
                // Response of the NIC to a probe of the administrator.
                if mad[1] == 4 {
                    let mut response = mad;
                    response[3] |= 0x80;
                    administrator.handle_mad(now, host, &response);
                }
            }
            if sent == before {
                return sent;
            }
        }
    }

    #[test]
    fn port_is_registered_and_renewed() {
        let mut now = Instant::now();
        let config = AdministratorConfig::new(ADMINISTRATOR.into(), Mtu::Mtu1024, [3; 16]);
        let mut administrator = Administrator::new(config);
        let mut port = registration();
        assert_eq!(port.deadline(), None);
        assert_eq!(exchange(now, &mut port, &mut administrator), 1);
        assert_eq!(administrator.usage().ports, 1);
        assert_eq!(port.deadline(), Some(now + RENEWAL));
        // It remains registered for an hour, also with a new administrator.
        for minute in 0..60 {
            now += RENEWAL;
            if minute == 30 {
                administrator = Administrator::new(config);
            }
            administrator.handle_timeout(now);
            assert_eq!(exchange(now, &mut port, &mut administrator), 1);
            assert_eq!(administrator.usage().ports, 1, "minute {minute}");
        }
        administrator.handle_timeout(now + 5 * RENEWAL);
        assert_eq!(administrator.usage().ports, 0);
    }

    #[test]
    fn missing_administrator_is_retried_later() {
        let start = Instant::now();
        let (mut now, mut port, mut sent) = (start, registration(), Vec::new());
        while now < start + 2 * RENEWAL {
            if port.poll(now).is_some() {
                sent.push((now - start).as_secs());
            }
            let next = port.deadline().unwrap();
            assert!(next > now);
            now = next;
        }
        // Four attempts with an interval of two seconds, and again after a pause.
        assert_eq!(sent, [0, 2, 4, 6, 68, 70, 72, 74]);
    }

    #[test]
    fn response_of_other_host_is_ignored() {
        let (now, mut port) = (Instant::now(), registration());
        let mut response = port.poll(now).unwrap();
        response[3] = 0x81;
        port.handle_mad(now, IpAddr::from([10, 0, 0, 9]).into(), &response);
        assert_eq!(port.state, State::Pending);
        port.handle_mad(now, IpAddr::from(ADMINISTRATOR).into(), &response);
        assert_eq!(port.state, State::Waiting(now + RENEWAL));
    }
}
