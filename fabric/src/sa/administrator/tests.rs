use super::super::client::{
    ClientConfig, QueryId, Request, SaClient, SaError, SaEvent, SaResponse,
};
use super::super::wire::attribute;
use super::super::wire::inform::{InformInfoRecord, InformMask, Notice};
use super::super::wire::mcmember::{McMemberMask, join_state};
use super::super::wire::service::ServiceMask;
use super::hosts::{FORGETTING, SWEEP};
use super::ports::{LIFETIME, node_record};
use super::*;
use riser_transport::verbs::PortCapabilities;
use riser_transport::wire::{MadHeader, TransactionId};
use zerocopy::FromZeros as _;
use zerocopy::big_endian::U32;

fn gid(last: u8) -> Gid {
    IpAddr::from([10, 0, 0, last]).into()
}

/// Response of a Linux host to a probe: the method is not supported.
fn nic_response(mad: &Mad) -> Option<Mad> {
    let mut response = *mad;
    response[3..6].copy_from_slice(&[0x81, 0, 0x0c]);
    (mad[1] == 4).then_some(response)
}

/// An administrator at 10.0.0.1, clients at the following addresses, and the network between them.
struct Fabric {
    now: Instant,
    administrator: Administrator,
    clients: Vec<(Gid, SaClient)>,
    /// One in `loss` datagrams is dropped at random; 0 disables loss.
    loss: usize,
    chance: fastrand::Rng,
    sent: usize,
    /// Notices received while waiting for responses, each with its client.
    kept: Vec<(usize, SaEvent)>,
}

impl Fabric {
    fn new(clients: u8) -> Self {
        Self::with(clients, Limits::default())
    }

    fn with(clients: u8, limits: Limits) -> Self {
        let config = AdministratorConfig {
            limits,
            ..AdministratorConfig::new([10, 0, 0, 1].into(), Mtu::Mtu4096, [1; 16])
        };
        let client = |n| SaClient::new(ClientConfig::new(gid(1)), 100 * u32::from(n));
        Self {
            now: Instant::now(),
            administrator: Administrator::new(config),
            clients: (2..2 + clients).map(|n| (gid(n), client(n))).collect(),
            loss: 0,
            chance: fastrand::Rng::with_seed(1),
            sent: 0,
            kept: Vec::new(),
        }
    }

    /// Replaces the administrator without preserving state.
    fn restart(&mut self) {
        self.administrator = Administrator::new(AdministratorConfig {
            secret: [2; 16],
            ..self.administrator.config
        });
    }

    /// Replaces the administrator, restores the stored state and returns it.
    fn restart_with_state(&mut self) -> Vec<(Gid, Mad)> {
        let requests = self.administrator.requests(self.now);
        self.restart();
        for (host, mad) in &requests {
            self.administrator.restore(self.now, *host, mad);
        }
        requests
    }

    fn is_lost(&mut self) -> bool {
        self.sent += 1;
        self.loss != 0 && self.chance.usize(..self.loss) == 0
    }

    /// Delivers all packets in flight.
    fn deliver(&mut self) {
        loop {
            let mut moved = false;
            for at in 0..self.clients.len() {
                while let Some(mad) = self.clients[at].1.poll_transmit() {
                    moved = true;
                    if !self.is_lost() {
                        let from = self.clients[at].0;
                        self.administrator.handle_mad(self.now, from, &mad);
                    }
                }
            }
            while let Some((to, mad)) = self.administrator.poll_transmit(self.now) {
                moved = true;
                let lost = self.is_lost();
                let client = self.clients.iter_mut().find(|(gid, _)| *gid == to);
                let Some((_, client)) = client.filter(|_| !lost) else {
                    continue;
                };
                client.handle_mad(self.now, gid(1), &mad);
                // The host's NIC responds to requests that the program does not handle.
                if let Some(response) = nic_response(&mad)
                    && !self.is_lost()
                {
                    self.administrator.handle_mad(self.now, to, &response);
                }
            }
            if !moved {
                return;
            }
        }
    }

    /// Advances the time and fires all timers in between.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.deliver();
            let clients = self
                .clients
                .iter()
                .filter_map(|(_, client)| client.poll_timeout());
            let next = clients.chain(self.administrator.poll_timeout()).min();
            let Some(next) = next.filter(|next| *next <= end) else {
                break;
            };
            self.now = self.now.max(next);
            let now = self.now;
            for (_, client) in &mut self.clients {
                client.handle_timeout(now);
            }
            self.administrator.handle_timeout(now);
        }
        self.now = end;
    }

    fn query(&mut self, client: usize, request: Request) -> Result<SaResponse, SaError> {
        let id = self.clients[client].1.query(self.now, request).unwrap();
        self.deliver();
        self.result(client, id)
    }

    fn result(&mut self, client: usize, id: QueryId) -> Result<SaResponse, SaError> {
        while let Some(event) = self.clients[client].1.poll_event() {
            match event {
                SaEvent::Completed { id: ended, result } if ended == id => return result,
                SaEvent::Completed { .. } => {}
                SaEvent::Notice(_) => self.kept.push((client, event)),
            }
        }
        panic!("no response");
    }

    fn notices(&mut self, client: usize) -> Vec<(Trap, Gid)> {
        let kept = self.kept.drain(..).filter(|(of, _)| *of == client);
        let events = std::iter::from_fn(|| self.clients[client].1.poll_event());
        kept.map(|(_, event)| event)
            .chain(events)
            .filter_map(|event| match event {
                SaEvent::Notice(notice) => notice.event(),
                SaEvent::Completed { .. } => None,
            })
            .collect()
    }
}

fn status(result: Result<SaResponse, SaError>) -> u16 {
    match result {
        Err(SaError::Status(status)) => status,
        other => panic!("{other:?}"),
    }
}

#[test]
fn paths_are_computed_from_gids() {
    let mut fabric = Fabric::new(1);
    let request = Request::path(gid(2), gid(9), Some(0x7fff), Some(0x1234));
    let path: PathRecord = fabric.query(0, request).unwrap().record().unwrap();
    assert_eq!((path.sgid(), path.dgid()), (gid(2), gid(9)));
    assert_eq!((path.pkey.get(), path.service_id.get()), (0x7fff, 0x1234));
    assert_eq!((path.hop_limit(), path.mtu.0), (64, 0x85));
    assert!(path.is_reversible());
    // A LID is ignored if a GID is present, and is insufficient without one.
    let wanted = PathRecord {
        slid: U16::new(1),
        ..path
    };
    let gids = PathMask::SGID | PathMask::DGID;
    let find = |mask| fabric.administrator.find_path(mask, &wanted).is_some();
    assert!(find(gids | PathMask::SLID) && !find(PathMask::DGID | PathMask::SLID));
    // Another partition, and an address that is not a port.
    let v6 = Gid::from(IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]));
    let group = Gid::from(IpAddr::from([239, 1, 1, 1]));
    for (dgid, pkey) in [(gid(9), Some(0x8001)), (v6, None), (group, None)] {
        let request = Request::path(gid(2), dgid, pkey, None);
        assert_eq!(status(fabric.query(0, request)), 0x0300, "{dgid}");
    }
}

#[test]
fn path_limits_follow_their_selectors() {
    use super::super::wire::Selector::{Best, Exactly, Greater, Less};

    let fabric = Fabric::new(0);
    let find = |selector, code| {
        let mask = PathMask::MTU | PathMask::MTU_SELECTOR;
        let wanted = PathRecord {
            mtu: super::super::wire::Limit::new(selector, code),
            sgid: gid(2).0,
            dgid: gid(3).0,
            ..PathRecord::default()
        };
        fabric.administrator.find_path(mask, &wanted).is_some()
    };
    assert!(find(Greater, 4) && find(Exactly, 5) && find(Less, 6) && find(Best, 1));
    assert!(!find(Greater, 5) && !find(Exactly, 4) && !find(Less, 5));
}

#[test]
fn path_table_contains_all_known_hosts() {
    let mut fabric = Fabric::new(40);
    for client in 0..40 {
        let request = Request::path(gid(2), gid(3), None, None);
        let from = gid(2 + client);
        let mut request = Some(request);
        let id = fabric.clients[usize::from(client)]
            .1
            .query(fabric.now, request.take().unwrap());
        assert!(id.is_ok(), "{from}");
    }
    fabric.deliver();
    let wanted = PathRecord::default();
    let response = fabric
        .query(0, Request::new(SaMethod::GetTable, 0, &wanted))
        .unwrap();
    let mut dgids: Vec<Gid> = response
        .records::<PathRecord>()
        .map(|path| path.dgid())
        .collect();
    dgids.sort_by_key(|gid| gid.0);
    assert_eq!(dgids, (1..42).map(gid).collect::<Vec<_>>());
    assert_eq!(fabric.administrator.usage().transfers, 0);
    // The number of paths is limited by the request; the same applies to nodes and ports.
    let wanted = PathRecord {
        reversible_and_count: 3,
        ..wanted
    };
    let mask = PathMask::NUMB_PATH.bits();
    let response = fabric
        .query(0, Request::new(SaMethod::GetTable, mask, &wanted))
        .unwrap();
    assert_eq!(response.records::<PathRecord>().count(), 3);
    let node = node_record(gid(7), 7);
    let response = fabric
        .query(0, Request::new(SaMethod::GetTable, 0, &node))
        .unwrap();
    assert_eq!(response.records::<NodeRecord>().count(), 41);
    let mask = NodeMask::PORT_GUID.bits();
    let response = fabric
        .query(0, Request::new(SaMethod::Get, mask, &node))
        .unwrap();
    assert_eq!(response.record(), Some(node));
    let port = fabric.administrator.port_info_record(gid(7));
    let response = fabric
        .query(0, Request::new(SaMethod::GetTable, 0, &port))
        .unwrap();
    assert_eq!(response.records::<PortInfoRecord>().count(), 41);
}

#[test]
fn tables_survive_datagram_loss() {
    for loss in [3, 4, 5, 7] {
        let mut fabric = Fabric::new(60);
        for (_, client) in &mut fabric.clients {
            let request = Request::path(gid(2), gid(3), None, None);
            client.query(fabric.now, request).unwrap();
        }
        fabric.deliver();
        fabric.loss = loss;
        let request = Request::new(SaMethod::GetTable, 0, &PathRecord::default());
        let id = fabric.clients[0].1.query(fabric.now, request).unwrap();
        fabric.pass(Duration::from_secs(60));
        let response = fabric.result(0, id).unwrap();
        assert_eq!(
            response.records::<PathRecord>().count(),
            61,
            "one in {loss} lost"
        );
        assert_eq!(fabric.administrator.usage().transfers, 0);
    }
}

#[test]
fn services_are_set_found_and_deleted() {
    let mut fabric = Fabric::new(2);
    let record = ServiceRecord::new(0x1000, gid(2)).with_name("riser");
    let set = fabric.query(0, Request::set_service(&record)).unwrap();
    assert_eq!(set.record(), Some(record));
    let mask = ServiceMask::NAME;
    let wanted = ServiceRecord::new(0, gid(9)).with_name("riser");
    let find = |method| Request::service(method, mask, &wanted);
    let found = fabric.query(1, find(SaMethod::GetTable)).unwrap();
    assert_eq!(found.records().collect::<Vec<ServiceRecord>>(), [record]);
    assert_eq!(
        fabric.query(1, find(SaMethod::Get)).unwrap().record(),
        Some(record)
    );
    // Only the owner may delete the record or set a record for its GID.
    let delete = Request::service(SaMethod::Delete, ServiceMask::ALL, &record);
    assert_eq!(status(fabric.query(1, delete.clone())), 0x0500);
    assert_eq!(
        status(fabric.query(1, Request::set_service(&record))),
        0x0500
    );
    fabric.query(0, delete.clone()).unwrap();
    assert_eq!(status(fabric.query(0, delete)), 0x0300);
    assert_eq!(status(fabric.query(1, find(SaMethod::Get))), 0x0300);
}

#[test]
fn service_key_protects_and_lease_expires() {
    let mut fabric = Fabric::new(2);
    let mut record = ServiceRecord::new(0x1000, gid(2));
    record.key = [7; 16];
    record.lease = U32::new(60);
    fabric.query(0, Request::set_service(&record)).unwrap();
    let mut other = record;
    other.key = [8; 16];
    assert_eq!(
        status(fabric.query(0, Request::set_service(&other))),
        0x0700
    );
    fabric.pass(Duration::from_secs(20));
    let find = Request::service(SaMethod::Get, ServiceMask::SERVICE_ID, &record);
    let found: ServiceRecord = fabric.query(1, find.clone()).unwrap().record().unwrap();
    assert_eq!((found.lease.get(), found.key), (40, [0; 16]));
    // Another Set renews it.
    fabric.query(0, Request::set_service(&record)).unwrap();
    fabric.pass(Duration::from_secs(59));
    assert_eq!(fabric.administrator.usage().services, 1);
    fabric.pass(Duration::from_secs(2));
    assert_eq!(status(fabric.query(1, find)), 0x0300);
}

fn group_request(mgid: Gid, port: Gid) -> (McMemberMask, McMemberRecord) {
    let mut record = McMemberRecord::new(mgid, port, join_state::FULL_MEMBER);
    record.qkey = U32::new(0x8001_0000);
    record.pkey = U16::new(0xffff);
    (McMemberMask::CREATE | McMemberMask::MGID, record)
}

#[test]
fn groups_live_until_last_full_member() {
    let mut fabric = Fabric::new(3);
    fabric
        .query(2, Request::inform(&InformInfo::new(None, true)))
        .unwrap();
    let mgid = Gid::from(IpAddr::from([239, 1, 2, 3]));
    let (mask, record) = group_request(mgid, gid(2));
    // A plain join does not create the group.
    let join = McMemberRecord::new(mgid, gid(3), join_state::SEND_ONLY_NON_MEMBER);
    let just_join = Request::join(McMemberMask::MGID, &join);
    assert_eq!(status(fabric.query(1, just_join.clone())), 0x0200);
    let made: McMemberRecord = fabric
        .query(0, Request::join(mask, &record))
        .unwrap()
        .record()
        .unwrap();
    assert_eq!((made.mgid(), made.port_gid()), (mgid, gid(2)));
    assert_eq!(
        (made.mlid.get(), made.mtu.0, made.join_state()),
        (0xc000, 0x85, 1)
    );
    let joined: McMemberRecord = fabric.query(1, just_join).unwrap().record().unwrap();
    assert_eq!((joined.qkey.get(), joined.join_state()), (0x8001_0000, 4));
    // Another queue key.
    let mut other = record;
    other.qkey = U32::new(5);
    other.port_gid = gid(3).0;
    assert_eq!(status(fabric.query(1, Request::join(mask, &other))), 0x0200);
    // Any host sees the group, but not its members.
    let look = Request::new(SaMethod::GetTable, 0, &McMemberRecord::default());
    let all: Vec<McMemberRecord> = fabric.query(2, look).unwrap().records().collect();
    assert_eq!(
        (all.len(), all[0].port_gid(), all[0].join_state()),
        (1, Gid([0; 16]), 5)
    );
    // The path to the group contains its LID.
    let request = Request::new(
        SaMethod::Get,
        PathMask::DGID.bits(),
        &PathRecord {
            dgid: mgid.0,
            ..PathRecord::default()
        },
    );
    let path: PathRecord = fabric.query(2, request).unwrap().record().unwrap();
    assert_eq!(path.dlid.get(), 0xc000);
    // A host cannot remove another host's membership.
    let leave = McMemberRecord::new(mgid, gid(2), join_state::FULL_MEMBER);
    assert_eq!(status(fabric.query(1, Request::leave(&leave))), 0x0500);
    fabric.query(0, Request::leave(&leave)).unwrap();
    assert_eq!(status(fabric.query(0, Request::leave(&leave))), 0x0200);
    assert_eq!(fabric.administrator.usage().members, 0);
    fabric.pass(Duration::from_secs(1));
    let notices = fabric.notices(2);
    let groups: Vec<_> = notices.iter().filter(|(_, about)| *about == mgid).collect();
    assert_eq!(
        groups,
        [&(Trap::GroupCreated, mgid), &(Trap::GroupDeleted, mgid)]
    );
    assert!(notices.contains(&(Trap::GidInService, gid(2))));
}

#[test]
fn allocated_group_gid_matches_address_family() {
    let mut fabric = Fabric::new(1);
    let (mask, record) = group_request(Gid([0; 16]), gid(2));
    let mut mgids = Vec::new();
    for _ in 0..2 {
        let made: McMemberRecord = fabric
            .query(0, Request::join(mask, &record))
            .unwrap()
            .record()
            .unwrap();
        assert!(made.mgid().ip().is_ipv4() && made.mgid().ip().is_multicast());
        mgids.push(made.mgid());
    }
    assert_ne!(mgids[0], mgids[1]);
    // A GID of the wrong address family, and a unicast GID.
    for mgid in [Gid([0xff; 16]), gid(5)] {
        let (mask, record) = group_request(mgid, gid(2));
        assert_eq!(
            status(fabric.query(0, Request::join(mask, &record))),
            0x0200
        );
    }
    // Required fields for group creation are missing.
    let (mask, record) = group_request(Gid::from(IpAddr::from([239, 5, 5, 5])), gid(2));
    let request = Request::join(mask - McMemberMask::QKEY, &record);
    assert_eq!(status(fabric.query(0, request)), 0x0600);
}

#[test]
fn unresponsive_subscriber_loses_its_subscription() {
    let mut fabric = Fabric::new(2);
    let subscribe = |is| Request::inform(&InformInfo::new(Some(Trap::GidInService), is));
    assert_eq!(status(fabric.query(0, subscribe(false))), 0x0200);
    fabric.query(0, subscribe(true)).unwrap();
    fabric.query(0, subscribe(true)).unwrap();
    assert_eq!(fabric.administrator.usage().subscriptions, 1);
    fabric.query(0, subscribe(false)).unwrap();
    assert_eq!(fabric.administrator.usage().subscriptions, 0);
    fabric.query(0, subscribe(true)).unwrap();
    let gone = fabric.clients.remove(0);
    fabric
        .query(0, Request::path(gid(3), gid(2), None, None))
        .unwrap();
    assert_eq!(fabric.administrator.usage().subscriptions, 1);
    fabric.pass(Duration::from_secs(10));
    assert_eq!(fabric.administrator.usage().subscriptions, 0);
    drop(gone);
}

#[test]
fn retransmitted_report_is_delivered_once() {
    let mut client = SaClient::new(ClientConfig::new(gid(1)), 1);
    let notice = Notice::new(Trap::GidInService, gid(5), gid(1));
    let header = |transaction| {
        SaHeader::new(
            MadMethod::Report,
            attribute::NOTICE,
            TransactionId(transaction),
            0,
        )
    };
    let now = Instant::now();
    for transaction in [1, 1, 2] {
        client.handle_mad(
            now,
            gid(1),
            &header(transaction).emit(zerocopy::IntoBytes::as_bytes(&notice)),
        );
    }
    // Sent by another port.
    client.handle_mad(now, gid(6), &header(3).emit(&[]));
    let responses: Vec<Mad> = std::iter::from_fn(|| client.poll_transmit()).collect();
    assert_eq!(
        responses.iter().map(|mad| mad[3]).collect::<Vec<_>>(),
        [0x86; 3]
    );
    assert_eq!(std::iter::from_fn(|| client.poll_event()).count(), 2);
}

#[test]
fn queries_end_by_cancellation_and_by_time() {
    let mut fabric = Fabric::new(1);
    fabric.loss = 1;
    let request = Request::path(gid(2), gid(3), None, None);
    let client = &mut fabric.clients[0].1;
    let first = client.query(fabric.now, request.clone()).unwrap();
    let second = client.query(fabric.now, request.clone()).unwrap();
    client.cancel(first);
    client.cancel(first);
    assert_eq!(fabric.result(0, first), Err(SaError::Canceled));
    fabric.pass(Duration::from_secs(7));
    assert_eq!(fabric.clients[0].1.poll_event(), None);
    fabric.pass(Duration::from_secs(2));
    assert_eq!(fabric.result(0, second), Err(SaError::TimedOut));
    assert!(fabric.clients[0].1.is_idle());
    // One request for the canceled query, and four for the second query.
    assert_eq!(fabric.sent, 5);
    // A response to a canceled query must not complete another query.
    fabric.loss = 0;
    let client = &mut fabric.clients[0].1;
    let id = client.query(fabric.now, request.clone()).unwrap();
    client.cancel(id);
    fabric.deliver();
    assert_eq!(fabric.result(0, id), Err(SaError::Canceled));
    for _ in 0..super::super::client::MAX_QUERIES {
        fabric.clients[0]
            .1
            .query(fabric.now, request.clone())
            .unwrap();
    }
    assert_eq!(
        fabric.clients[0].1.query(fabric.now, request),
        Err(SaError::Busy)
    );
}

#[test]
fn limits_apply_per_host_and_total() {
    let limits = Limits {
        hosts: 4,
        services: (3, 2),
        groups: 2,
        members: (2, 2),
        subscriptions: (2, 1),
        transfers: (2, 1),
    };
    let mut fabric = Fabric::with(6, limits);
    let service =
        |id, client: usize| Request::set_service(&ServiceRecord::new(id, gid(2 + client as u8)));
    for (id, client, expected) in [
        (1, 0, 0),
        (2, 0, 0),
        (3, 0, 0x0100),
        (4, 1, 0),
        (5, 1, 0x0100),
    ] {
        let result = fabric.query(client, service(id, client));
        let got = result.err().map_or(0, |e| status(Err(e)));
        assert_eq!(got, expected, "service {id}");
    }
    // Existing records can be renewed.
    fabric.query(0, service(1, 0)).unwrap();
    let subscribe = |trap| Request::inform(&InformInfo::new(Some(trap), true));
    fabric.query(2, subscribe(Trap::GroupCreated)).unwrap();
    assert_eq!(
        status(fabric.query(2, subscribe(Trap::GroupDeleted))),
        0x0100
    );
    fabric.query(3, subscribe(Trap::GroupCreated)).unwrap();
    // All slots belong to hosts with stored state. Requests from any other host still receive a
    // response, but cannot store state.
    assert_eq!(status(fabric.query(4, service(9, 4))), 0x0100);
    fabric
        .query(4, Request::path(gid(6), gid(2), None, None))
        .unwrap();
    let usage = fabric.administrator.usage();
    assert_eq!(
        (usage.hosts, usage.services, usage.subscriptions),
        (4, 3, 2)
    );
}

#[test]
fn host_without_state_is_forgotten() {
    let mut fabric = Fabric::new(2);
    let request = Request::path(gid(2), gid(3), None, None);
    fabric.query(0, request.clone()).unwrap();
    fabric
        .query(1, Request::inform(&InformInfo::new(None, true)))
        .unwrap();
    fabric.pass(FORGETTING + SWEEP);
    assert_eq!(fabric.administrator.usage().hosts, 1);
    assert_eq!(fabric.notices(1), [(Trap::GidOutOfService, gid(2))]);
}

#[test]
fn forged_request_triggers_few_datagrams() {
    let mut fabric = Fabric::new(0);
    for last in 0..200 {
        let header = SaHeader::new(
            MadMethod::GetTable,
            attribute::PATH_RECORD,
            TransactionId(last),
            0,
        );
        let from = gid(2 + last as u8);
        fabric
            .administrator
            .handle_mad(fabric.now, from, &header.emit(&[]));
    }
    fabric.pass(Duration::from_secs(60));
    // The first segment and three retransmissions, or a rejection, and one probe.
    assert!(fabric.sent <= 200 * 5, "{}", fabric.sent);
    assert_eq!(fabric.administrator.usage().transfers, 0);
}

#[test]
fn unsupported_requests_fail_with_class_status() {
    let mut administrator = Fabric::new(0).administrator;
    let now = Instant::now();
    let mut status_of = |change: &dyn Fn(&mut Mad)| {
        let header = SaHeader::new(MadMethod::Get, attribute::PATH_RECORD, TransactionId(9), 0);
        let mut mad = header.emit(&[]);
        change(&mut mad);
        administrator.handle_mad(now, gid(2), &mad);
        let mut sent = std::iter::from_fn(|| administrator.poll_transmit(now));
        let response = sent.find(|(_, mad)| mad[1] == 3);
        response.map(|(_, mad)| u16::from_be_bytes([mad[4], mad[5]]))
    };
    // A Get without a destination; an unsupported version, method and attribute.
    assert_eq!(status_of(&|_| {}), Some(0x0600));
    assert_eq!(status_of(&|mad| mad[2] = 1), Some(0x0004));
    assert_eq!(status_of(&|mad| mad[3] = 0x13), Some(0x0008));
    assert_eq!(status_of(&|mad| mad[17] = 0x36), Some(0x000c));
    // ClassPortInfo.
    assert_eq!(
        status_of(&|mad| mad[16..18].copy_from_slice(&[0, 1])),
        Some(0)
    );
    // Methods without a response, and unsupported classes.
    assert_eq!(status_of(&|mad| mad[3] = 5), None);
    assert_eq!(status_of(&|mad| mad[3] = 0x81), None);
    assert_eq!(status_of(&|mad| mad[1] = 4), None);
}

/// Stored state and responses must remain within their limits for arbitrary datagrams.
#[test]
fn subnet_administrator() {
    bolero::check!(name = "subnet_administrator").for_each(|input: &[u8]| {
        let mut fabric = Fabric::new(0);
        let most = Limits::default();
        for (at, chunk) in input.chunks(96).enumerate() {
            let mut mad = [0; 256];
            // An almost valid header, so that the remaining fields are parsed.
            mad[..4].copy_from_slice(&[1, 3, 2, 1]);
            let [choice, rest @ ..] = chunk else {
                continue;
            };
            let attributes = [0x35, 0x31, 0x38, 0x03, 0x11, 0x12, 0x01, 0xf3];
            mad[17] = attributes[usize::from(choice & 7)];
            mad[3] = [1, 2, 0x12, 0x15][usize::from(choice >> 3 & 3)];
            let len = rest.len().min(200);
            if choice & 0x80 == 0 {
                mad[48..48 + len].copy_from_slice(&rest[..len]);
            } else {
                mad[..len].copy_from_slice(&rest[..len]);
            }
            let from = gid(choice >> 5);
            fabric.administrator.handle_mad(fabric.now, from, &mad);
            while let Some((to, mad)) = fabric.administrator.poll_transmit(fabric.now) {
                assert!(mad[0] == 1 && matches!(mad[1], 3 | 4));
                // Most hosts respond.
                if let Some(response) = nic_response(&mad).filter(|_| to != gid(7)) {
                    fabric.administrator.handle_mad(fabric.now, to, &response);
                }
            }
            if at % 8 == 7 {
                fabric.now += Duration::from_millis(u64::from(*choice) * 16);
                fabric.administrator.handle_timeout(fabric.now);
            }
            let usage = fabric.administrator.usage();
            assert!(usage.hosts <= most.hosts && usage.services <= most.services.0);
            assert!(usage.members <= most.members.0 && usage.groups <= most.groups);
            assert!(usage.transfers <= most.transfers.0);
            // Groups without members are deleted.
            assert!(usage.members >= usage.groups);
        }
    });
}

/// Registrations of ports and queries for them are compared with a model.
#[test]
fn port_registrations() {
    /// Returns the status and the data of the response to a host.
    fn respond(fabric: &mut Fabric, from: Gid, mad: &Mad) -> (u16, Vec<u8>) {
        fabric.administrator.handle_mad(fabric.now, from, mad);
        let mut response = None;
        while let Some((to, mad)) = fabric.administrator.poll_transmit(fabric.now) {
            match nic_response(&mad) {
                Some(response) => fabric.administrator.handle_mad(fabric.now, to, &response),
                None if to == from => response = Some(mad),
                None => {}
            }
        }
        let mad = response.expect("a response");
        (u16::from_be_bytes([mad[4], mad[5]]), mad[56..].to_vec())
    }

    bolero::check!(name = "port_registrations").for_each(|input: &[u8]| {
        const OWN: usize = 0;
        let mut fabric = Fabric::new(4);
        // Capabilities and expiration times. The first port belongs to the administrator.
        let mut registered: [Option<(u32, Instant)>; 5] = [None; 5];
        let mut is_present = [true, false, false, false, false];
        for chunk in input.chunks_exact(8) {
            let [first, mask, port, flags, capabilities @ ..] = chunk else {
                continue;
            };
            let (host, action) = (1 + usize::from(first & 3), first >> 2 & 3);
            if action == 3 {
                fabric.pass(Duration::from_secs(u64::from(*mask)));
                let now = fabric.now;
                for port in &mut registered {
                    *port = port.filter(|(_, until)| *until > now);
                }
                // Hosts without state are forgotten until their next request.
                for host in (1..5).filter(|host| is_present[*host]) {
                    let record = PortInfoRecord::new_zeroed();
                    let request = Request::new(SaMethod::GetTable, 0, &record);
                    fabric.query(host - 1, request).unwrap();
                }
                continue;
            }
            let wanted = u32::from_be_bytes(capabilities.try_into().unwrap());
            let mut record = PortInfoRecord::new_zeroed();
            (record.port, record.info.capabilities) = (port & 3, U32::new(wanted));
            let mask = u64::from(mask & 0x82 | flags & 4);
            let method = [SaMethod::Set, SaMethod::Get, SaMethod::GetTable][usize::from(action)];
            let request = Request::new(method, mask, &record);
            let mut mad = request.emit(TransactionId(77));
            mad[20] = flags & 0x80;
            let is_subset = action == 1 && flags & 0x80 != 0;
            let has = |ports: &[Option<(u32, Instant)>; 5], host: usize| {
                ports[host].map_or(1 << 16, |(capabilities, _)| capabilities)
            };
            let matches = |found: u32| {
                let can = match is_subset {
                    true => found & wanted == wanted,
                    false => found == wanted,
                };
                (mask & 2 == 0 || port & 3 == 1) && (mask & 0x80 == 0 || can)
            };
            let known = (0..5).filter(|at| *at == OWN || *at == host || is_present[*at]);
            let found = known.map(|at| has(&registered, at));
            let mut found: Vec<u32> = found.filter(|found| matches(*found)).collect();
            found.sort_unstable();
            let from = gid(1 + host as u8);
            let first_of = |data: &[u8]| u32::from_be_bytes(data[24..28].try_into().unwrap());
            match method {
                SaMethod::Set => {
                    let (status, data) = respond(&mut fabric, from, &mad);
                    match mask {
                        _ if mask & 0x80 == 0 => assert_eq!(status, 0x0600),
                        0x80 => {
                            assert_eq!((status, first_of(&data)), (0, wanted));
                            registered[host] = Some((wanted, fabric.now + LIFETIME));
                        }
                        _ => assert_eq!(status, 0x0200),
                    }
                }
                SaMethod::Get => {
                    let (status, data) = respond(&mut fabric, from, &mad);
                    match found[..] {
                        [] => assert_eq!(status, 0x0300),
                        [found] => assert_eq!((status, first_of(&data)), (0, found)),
                        _ => assert_eq!(status, 0x0400),
                    }
                }
                _ => {
                    let response = fabric.query(host - 1, request).unwrap();
                    let records = response.records::<PortInfoRecord>();
                    let mut listed: Vec<u32> =
                        records.map(|port| port.info.capabilities.get()).collect();
                    listed.sort_unstable();
                    assert_eq!(listed, found);
                }
            }
            is_present[host] = true;
            assert!(fabric.administrator.ports.len() <= 4);
        }
    });
}

/// Each query must complete exactly once for arbitrary datagrams from the administrator.
#[test]
fn subnet_administration_client() {
    bolero::check!(name = "subnet_administration_client").for_each(|input: &[u8]| {
        let mut client = SaClient::new(ClientConfig::new(gid(1)), 0);
        let mut now = Instant::now();
        let request = Request::new(SaMethod::GetTable, 0, &PathRecord::default());
        let get = Request::path(gid(2), gid(3), None, None);
        let mut queries = 0;
        let mut ended = 0;
        for chunk in input.chunks(64) {
            if client
                .query(now, [&request, &get][queries % 2].clone())
                .is_ok()
            {
                queries += 1;
            }
            let mut mad = [0; 256];
            mad[..4].copy_from_slice(&[1, 3, 2, 0x92]);
            mad[15] = chunk[0];
            mad[17] = 0x35;
            mad[24..28].copy_from_slice(&[1, 1, 0, 0]);
            let len = chunk.len() - 1;
            if chunk[0] & 1 == 0 {
                mad[26..26 + len].copy_from_slice(&chunk[1..]);
            } else {
                mad[..len].copy_from_slice(&chunk[1..]);
            }
            client.handle_mad(now, gid(1), &mad);
            while client.poll_transmit().is_some() {}
            now += Duration::from_millis(u64::from(chunk[0]) * 4);
            client.handle_timeout(now);
            while let Some(event) = client.poll_event() {
                if let SaEvent::Completed { result, .. } = event {
                    ended += 1;
                    if let Ok(response) = result {
                        assert!(response.records::<PathRecord>().count() <= 1024);
                    }
                }
            }
        }
        for _ in 0..8 {
            now += Duration::from_secs(2);
            client.handle_timeout(now);
        }
        while client.poll_transmit().is_some() {}
        let events = std::iter::from_fn(|| client.poll_event());
        ended += events
            .filter(|e| matches!(e, SaEvent::Completed { .. }))
            .count();
        assert_eq!(ended, queries);
        assert!(client.is_idle());
    });
}

/// Builds a segment of the response to a client's first query.
fn response_segment(number: u32, kind: u8) -> Mad {
    let flags = if number == 1 { 3 } else { 1 };
    let mut header = SaHeader::new(
        MadMethod::GetTableResp,
        attribute::PATH_RECORD,
        TransactionId(0),
        0,
    );
    header.rmpp.version = 1;
    header.rmpp.rmpp_type = kind;
    header.rmpp.time_and_flags = flags;
    header.rmpp.segment = U32::new(number);
    header.attribute_offset = U16::new(8);
    header.emit(&[])
}

#[test]
fn repeated_segments_do_not_extend_query() {
    let mut client = SaClient::new(ClientConfig::new(gid(1)), 0);
    let mut now = Instant::now();
    let request = Request::new(SaMethod::GetTable, 0, &PathRecord::default());
    client.query(now, request).unwrap();
    for _ in 0..40 {
        client.handle_mad(now, gid(1), &response_segment(1, rmpp_type::DATA));
        client.handle_mad(now, gid(1), &response_segment(3, rmpp_type::DATA));
        now += Duration::from_millis(500);
        client.handle_timeout(now);
    }
    let Some(SaEvent::Completed { result, .. }) = client.poll_event() else {
        panic!("it waits still");
    };
    assert_eq!(result, Err(SaError::TimedOut));
}

#[test]
fn aborted_response_fails_query_silently() {
    let mut client = SaClient::new(ClientConfig::new(gid(1)), 0);
    let now = Instant::now();
    let request = Request::new(SaMethod::GetTable, 0, &PathRecord::default());
    client.query(now, request).unwrap();
    client.handle_mad(now, gid(1), &response_segment(1, rmpp_type::DATA));
    while client.poll_transmit().is_some() {}
    client.handle_mad(now, gid(1), &response_segment(1, rmpp_type::ABORT));
    assert!(client.poll_event().is_some());
    assert_eq!(client.poll_transmit(), None);
}

#[test]
fn forged_queries_leave_host_state_intact() {
    let mut fabric = Fabric::new(1);
    let most = Limits::default().transfers;
    // Requests from the maximum number of other hosts, and from the host itself.
    let others = (0..most.0 as u64).map(|n| (10 + n as u8, n));
    for (from, transaction) in others.chain((0..most.1 as u64).map(|n| (2, n))) {
        let transaction = TransactionId(0xdead_0000 + transaction);
        let header = SaHeader::new(MadMethod::GetTable, attribute::PATH_RECORD, transaction, 0);
        fabric
            .administrator
            .handle_mad(fabric.now, gid(from), &header.emit(&[]));
    }
    let request = Request::new(SaMethod::GetTable, 0, &PathRecord::default());
    let response = fabric.query(0, request).unwrap();
    assert!(response.records::<PathRecord>().count() > 0);
}

#[test]
fn full_administrator_still_returns_tables() {
    let limits = Limits::default();
    let hosts = limits.services.0.div_ceil(limits.services.1);
    let mut fabric = Fabric::new(hosts as u8);
    for at in 0..limits.services.0 {
        let (client, id) = (at / limits.services.1, at as u64);
        let record = ServiceRecord::new(id, fabric.clients[client].0);
        fabric.query(client, Request::set_service(&record)).unwrap();
    }
    let wanted = ServiceRecord::new(0, gid(2));
    let find = Request::service(SaMethod::GetTable, ServiceMask::empty(), &wanted);
    let all = fabric.query(0, find).unwrap();
    assert_eq!(all.records::<ServiceRecord>().count(), limits.services.0);
}

#[test]
fn notices_after_restart_are_not_duplicates() {
    let mut fabric = Fabric::new(3);
    let path = Request::path(gid(3), gid(2), None, None);
    let subscription = Request::inform(&InformInfo::new(Some(Trap::GidInService), true));
    fabric.query(0, subscription.clone()).unwrap();
    fabric.query(1, path.clone()).unwrap();
    fabric.pass(Duration::from_secs(1));
    assert_eq!(fabric.notices(0), [(Trap::GidInService, gid(3))]);
    fabric.restart();
    fabric.query(0, subscription).unwrap();
    fabric.query(2, path).unwrap();
    fabric.pass(Duration::from_secs(1));
    assert_eq!(fabric.notices(0), [(Trap::GidInService, gid(4))]);
}

#[test]
fn ports_match_by_capabilities() {
    let mut fabric = Fabric::new(1);
    let mut wanted = fabric.administrator.port_info_record(gid(2));
    let mut count = |bits: u32, modifier: u32| {
        wanted.info.capabilities = U32::new(bits);
        let mut mad = Request::new(SaMethod::GetTable, 1 << 7, &wanted).emit(TransactionId(1));
        mad[20..24].copy_from_slice(&modifier.to_be_bytes());
        fabric.administrator.handle_mad(fabric.now, gid(2), &mad);
        let (_, mad) = std::iter::from_fn(|| fabric.administrator.poll_transmit(fabric.now))
            .find(|(_, mad)| mad[1] == 3)
            .unwrap();
        // The total length without the header is that of two ports or zero.
        (u32::from_be_bytes(mad[32..36].try_into().unwrap()) - 20) / 72
    };
    // At least the selected bits, or exactly these bits.
    assert_eq!(count(1 << 16, 1 << 31), 2);
    assert_eq!(count(1 << 16, 0), 2);
    assert_eq!(count(0, 1 << 31), 2);
    assert_eq!(count(0, 0), 0);
    // `saquery -s` looks up subnet managers this way.
    assert_eq!(count(1 << 1, 1 << 31), 0);
    assert_eq!(count(1 << 10 | 1 << 16, 1 << 31), 0);
}

/// Queries the LIDs of the ports with a capability like srp_daemon: mask and modifier of its query
/// for device management.
fn lids_with(fabric: &mut Fabric, capability: PortCapabilities) -> Vec<u16> {
    let mut wanted = PortInfoRecord::new_zeroed();
    wanted.info.capabilities = U32::new(capability.bits());
    let mut mad = Request::new(SaMethod::GetTable, 1 << 7, &wanted).emit(TransactionId(1));
    mad[20] = 0x80;
    fabric.administrator.handle_mad(fabric.now, gid(2), &mad);
    let response = std::iter::from_fn(|| fabric.administrator.poll_transmit(fabric.now))
        .find(|(_, mad)| mad[1] == 3)
        .unwrap();
    let len = u32::from_be_bytes(response.1[32..36].try_into().unwrap()) as usize - 20;
    let records = response.1[56..56 + len].chunks(72);
    records.map(|r| u16::from_be_bytes([r[0], r[1]])).collect()
}

#[test]
fn registered_capabilities_expire_without_renewal() {
    let mut fabric = Fabric::new(2);
    let dm = PortCapabilities::DEVICE_MANAGEMENT;
    assert!(lids_with(&mut fabric, dm).is_empty());
    let both = PortCapabilities::COMMUNICATION_MANAGEMENT | dm;
    let port: PortInfoRecord = fabric
        .query(1, Request::set_port(both))
        .unwrap()
        .record()
        .unwrap();
    assert_eq!((port.lid.get(), port.info.lid.get()), (3, 3));
    assert_eq!(port.info.master_sm_lid.get(), 1);
    assert_eq!(port.info.capabilities.get(), 0x9_0000);
    assert_eq!(lids_with(&mut fabric, dm), [3]);
    // A renewal replaces the registration, and it is restored after a restart.
    fabric.pass(LIFETIME - Duration::from_secs(1));
    fabric.query(1, Request::set_port(both)).unwrap();
    assert_eq!(fabric.administrator.usage().ports, 1);
    assert_eq!(fabric.restart_with_state().len(), 1);
    fabric.pass(LIFETIME - Duration::from_secs(1));
    assert_eq!(lids_with(&mut fabric, dm), [3]);
    fabric.pass(Duration::from_secs(1));
    assert_eq!(fabric.administrator.usage().ports, 0);
    assert!(lids_with(&mut fabric, dm).is_empty());
}

#[test]
fn port_registration_only_contains_capabilities() {
    let mut fabric = Fabric::new(1);
    let port = fabric.administrator.port_info_record(gid(2));
    for (mask, expected) in [
        (0, SaStatus::InsufficientComponents),
        (1, SaStatus::InsufficientComponents),
        (1 << 7 | 1, SaStatus::ReqInvalid),
    ] {
        let result = fabric.query(0, Request::new(SaMethod::Set, mask, &port));
        assert_eq!(status(result), expected as u16, "{mask:#x}");
    }
    assert_eq!(fabric.administrator.usage().ports, 0);
}

#[test]
fn nodes_and_paths_are_found_by_lids() {
    let mut fabric = Fabric::new(3);
    for client in 0..3 {
        let request = Request::path(gid(2), gid(3), None, None);
        let path: PathRecord = fabric.query(client, request).unwrap().record().unwrap();
        assert_eq!((path.dlid.get(), path.slid.get()), (0, 0));
    }
    let node = |lid: u16| NodeRecord {
        lid: U16::new(lid),
        ..NodeRecord::new_zeroed()
    };
    for lid in 1..=4 {
        let request = Request::new(SaMethod::Get, NodeMask::LID.bits(), &node(lid));
        let found: NodeRecord = fabric.query(0, request).unwrap().record().unwrap();
        assert_eq!(found, node_record(gid(lid as u8), lid));
    }
    let request = Request::new(SaMethod::Get, NodeMask::LID.bits(), &node(5));
    assert_eq!(status(fabric.query(0, request)), SaStatus::NoRecords as u16);
    // srp_daemon: DLID, SLID and P_Key.
    let path = |slid: u16, dlid: u16| {
        let record = PathRecord {
            slid: U16::new(slid),
            dlid: U16::new(dlid),
            pkey: U16::new(0xffff),
            ..PathRecord::default()
        };
        Request::new(SaMethod::Get, 1 << 4 | 1 << 5 | 1 << 13, &record)
    };
    let found: PathRecord = fabric.query(0, path(2, 4)).unwrap().record().unwrap();
    assert_eq!((found.sgid(), found.dgid()), (gid(2), gid(4)));
    assert_eq!((found.slid.get(), found.dlid.get()), (2, 4));
    assert_eq!(found.pkey.get(), 0xffff);
    for (slid, dlid) in [(9, 4), (2, 9), (2, 0xc000)] {
        let result = fabric.query(0, path(slid, dlid));
        assert_eq!(status(result), SaStatus::NoRecords as u16, "{slid} {dlid}");
    }
}

#[test]
fn used_lid_is_not_assigned_again() {
    let mut fabric = Fabric::new(0);
    let gids = [
        "fd00::1:2",
        "fd00::2:2",
        "fd00::2",
        "fd00::ffff",
        "10.0.0.1",
    ];
    let gids = gids.map(|text| Gid::from(text.parse::<IpAddr>().unwrap()));
    for gid in gids {
        let client = SaClient::new(ClientConfig::new(self::gid(1)), 1);
        fabric.clients.push((gid, client));
        let at = fabric.clients.len() - 1;
        let mask = NodeMask::PORT_GUID.bits();
        let wanted = node_record(gid, 0);
        let _ = fabric.query(at, Request::new(SaMethod::GetTable, mask, &wanted));
    }
    // The administrator has LID 1.
    let lids = gids.map(|gid| fabric.administrator.hosts.lid(gid));
    assert_eq!(lids, [2, 3, 4, 5, 1]);
    let found = lids.map(|lid| fabric.administrator.hosts.with_lid(lid));
    assert_eq!(found, gids.map(Some));
}

#[test]
fn repeated_probe_response_keeps_lid() {
    let now = Instant::now();
    let mut hosts = Hosts::new(4, gid(1), [7; 16]);
    let host = gid(2);
    let _ = hosts.note(now, host, FxHashSet::default);
    let transaction = MadHeader::of(&hosts.question(host)).transaction();
    for is_new in [true, false] {
        let response = hosts.handle_response(now, host, transaction).unwrap();
        assert_eq!((response.is_new, hosts.lid(host)), (is_new, 2));
    }
}

#[test]
fn state_of_forged_host_is_not_stored() {
    let mut fabric = Fabric::new(1);
    fabric
        .query(0, Request::inform(&InformInfo::new(None, true)))
        .unwrap();
    let mgid = Gid::from(IpAddr::from([239, 1, 2, 3]));
    let before = fabric.sent;
    for last in 50..250 {
        let (mask, record) = group_request(mgid, gid(last));
        for request in [
            Request::set_service(&ServiceRecord::new(1, gid(last))),
            Request::inform(&InformInfo::new(None, true)),
            Request::join(mask, &record),
        ] {
            let mad = request.emit(TransactionId(7));
            fabric.administrator.handle_mad(fabric.now, gid(last), &mad);
            // Response to a probe that the host never received: any number but the right one.
            let mut response = [0; 256];
            response[..4].copy_from_slice(&[1, 4, 1, 0x81]);
            response[8] = last;
            fabric
                .administrator
                .handle_mad(fabric.now, gid(last), &response);
            fabric.deliver();
        }
    }
    fabric.pass(Duration::from_secs(20));
    // Each request triggered one datagram.
    assert_eq!(fabric.sent - before, 600);
    let usage = fabric.administrator.usage();
    assert_eq!(
        (usage.services, usage.groups, usage.subscriptions),
        (0, 0, 1)
    );
    // Nor does it occur in a table or a notice.
    assert_eq!(fabric.notices(0), []);
    let nodes = Request::new(SaMethod::GetTable, 0, &node_record(gid(2), 2));
    let nodes = fabric.query(0, nodes).unwrap();
    assert_eq!(nodes.records::<NodeRecord>().count(), 2);
    fabric.pass(FORGETTING + SWEEP);
    assert_eq!(fabric.administrator.usage().hosts, 1);
}

#[test]
fn forged_hosts_do_not_evict_present_hosts() {
    let limits = Limits {
        hosts: 4,
        ..Limits::default()
    };
    let mut fabric = Fabric::with(3, limits);
    let path = Request::path(gid(2), gid(3), None, None);
    for client in 0..3 {
        fabric.query(client, path.clone()).unwrap();
    }
    for last in 50..250 {
        let mad = path.emit(TransactionId(7));
        fabric.administrator.handle_mad(fabric.now, gid(last), &mad);
        fabric.deliver();
    }
    let nodes = Request::new(SaMethod::GetTable, 0, &node_record(gid(2), 2));
    let nodes = fabric.query(0, nodes).unwrap();
    assert_eq!(nodes.records::<NodeRecord>().count(), 4);
}

#[test]
fn unresponsive_host_loses_its_state() {
    let mut fabric = Fabric::new(3);
    fabric
        .query(0, Request::inform(&InformInfo::new(None, true)))
        .unwrap();
    let mgid = Gid::from(IpAddr::from([239, 1, 2, 3]));
    for client in [1, 2] {
        let host = fabric.clients[client].0;
        let service = ServiceRecord::new(1, host);
        fabric
            .query(client, Request::set_service(&service))
            .unwrap();
        let of_none = InformInfo {
            gid: [9; 16],
            ..InformInfo::new(None, true)
        };
        fabric.query(client, Request::inform(&of_none)).unwrap();
    }
    let (mask, record) = group_request(mgid, gid(4));
    fabric.query(2, Request::join(mask, &record)).unwrap();
    fabric.pass(Duration::from_secs(5));
    fabric.notices(0);
    // One client is silent for weeks but responds to probes; the other one was removed.
    let gone = fabric.clients.pop();
    fabric.pass(Duration::from_secs(30 * 60));
    assert_eq!(fabric.administrator.usage().services, 2);
    fabric.pass(Duration::from_secs(14 * 24 * 3600));
    let usage = fabric.administrator.usage();
    assert_eq!(
        (usage.services, usage.groups, usage.subscriptions),
        (1, 0, 2)
    );
    assert_eq!(
        fabric.notices(0),
        [(Trap::GroupDeleted, mgid), (Trap::GidOutOfService, gid(4))]
    );
    drop(gone);
}

#[test]
fn paused_administrator_keeps_its_hosts() {
    let mut fabric = Fabric::new(1);
    let service = ServiceRecord::new(1, gid(2));
    fabric.query(0, Request::set_service(&service)).unwrap();
    // A debugger or a live migration: no timer fires for a day.
    fabric.now += Duration::from_secs(24 * 3600);
    let now = fabric.now;
    fabric.administrator.handle_timeout(now);
    fabric.pass(Duration::from_secs(3600));
    assert_eq!(fabric.administrator.usage().services, 1);
}

#[test]
fn subscriptions_are_found_by_their_hosts() {
    let mut fabric = Fabric::new(3);
    let of = |trap| InformInfo::new(Some(trap), true);
    for trap in [Trap::GroupCreated, Trap::GroupDeleted] {
        fabric.query(0, Request::inform(&of(trap))).unwrap();
    }
    fabric
        .query(1, Request::inform(&of(Trap::GroupCreated)))
        .unwrap();
    let mut find = |mask: InformMask, gid: Gid, number: u16| {
        let wanted = InformInfoRecord {
            subscriber_gid: gid.0,
            subscriber_enum: U16::new(number),
            ..InformInfoRecord::default()
        };
        let request = Request::new(SaMethod::GetTable, mask.bits(), &wanted);
        let response = fabric.query(2, request).unwrap();
        response.records().collect::<Vec<InformInfoRecord>>()
    };
    let all = find(InformMask::empty(), gid(2), 0);
    assert_eq!(all.len(), 3);
    let one = find(InformMask::SUBSCRIBER_GID, gid(3), 0);
    assert_eq!(one.len(), 1);
    // The queue pair that receives the reports is private to its owner (C15-0.2-1.16).
    assert_eq!((one[0].info.qpn(), one[0].info.subscribe), (0, 1));
    let mask = InformMask::SUBSCRIBER_GID | InformMask::SUBSCRIBER_ENUM;
    let second = find(mask, gid(2), 1);
    assert_eq!(second.len(), 1);
    assert_eq!(second[0].info.trap_number.get(), Trap::GroupDeleted as u16);
}

#[test]
fn registrations_survive_administrator_restart() {
    let mut fabric = Fabric::new(4);
    let mut service = ServiceRecord::new(0x1000, gid(2)).with_name("riser");
    (service.key, service.lease) = ([7; 16], U32::new(600));
    fabric.query(0, Request::set_service(&service)).unwrap();
    let mut mgids = Vec::new();
    for last in [1, 2] {
        let mgid = Gid::from(IpAddr::from([239, 1, 2, last]));
        let (mask, record) = group_request(mgid, gid(2));
        fabric.query(0, Request::join(mask, &record)).unwrap();
        let join = McMemberRecord::new(mgid, gid(3), join_state::SEND_ONLY_NON_MEMBER);
        fabric
            .query(1, Request::join(McMemberMask::MGID, &join))
            .unwrap();
        mgids.push(mgid);
    }
    fabric
        .query(2, Request::inform(&InformInfo::new(None, true)))
        .unwrap();
    // A host that was removed before the new administrator starts.
    let gone = ServiceRecord::new(0x2000, gid(5));
    fabric.query(3, Request::set_service(&gone)).unwrap();
    let look = Request::new(SaMethod::GetTable, 0, &McMemberRecord::default());
    let groups = fabric.query(2, look.clone()).unwrap();
    let before = fabric.administrator.usage();
    assert!(fabric.administrator.changes() >= 7);
    fabric.pass(Duration::from_secs(100));
    fabric.clients.pop();

    let requests = fabric.administrator.requests(fabric.now);
    assert_eq!(requests.len(), 7);
    fabric.restart();
    // The most recent group must still get its previous LID.
    for (host, mad) in requests.iter().rev() {
        fabric.administrator.restore(fabric.now, *host, mad);
    }
    // Restored state is inactive until its host responds, and forged hosts cannot occupy its slots.
    assert_eq!(fabric.administrator.usage().services, 0);
    fabric.deliver();
    let usage = fabric.administrator.usage();
    assert_eq!((usage.services, usage.subscriptions), (1, 1));
    assert_eq!(usage.groups, before.groups);
    let find = Request::service(SaMethod::Get, ServiceMask::SERVICE_ID, &service);
    let found: ServiceRecord = fabric.query(2, find).unwrap().record().unwrap();
    assert_eq!(found.lease.get(), 500);
    let mut other = service;
    other.key = [8; 16];
    assert_eq!(
        status(fabric.query(0, Request::set_service(&other))),
        0x0700
    );
    let sorted = |response: &SaResponse| {
        let mut all: Vec<McMemberRecord> = response.records().collect();
        all.sort_by_key(|record| record.mgid);
        // A send-only member may have been probed before the group existed.
        all.iter_mut()
            .for_each(|record| *record = record.with_state(record.scope(), 1));
        all
    };
    let again = fabric.query(2, look).unwrap();
    assert_eq!(sorted(&again), sorted(&groups));
    // The other host is probed for an hour.
    fabric.pass(Duration::from_secs(30 * 60));
    let hosts = fabric.administrator.usage().hosts;
    fabric.pass(Duration::from_secs(3600));
    assert_eq!(fabric.administrator.usage().hosts, hosts - 1);
}

#[test]
fn probed_host_may_change_restored_state() {
    let mut fabric = Fabric::new(1);
    let service = ServiceRecord::new(0x1000, gid(2));
    fabric.query(0, Request::set_service(&service)).unwrap();
    fabric.restart_with_state();
    // The probe is lost, and the host deletes its record.
    while fabric.administrator.poll_transmit(fabric.now).is_some() {}
    let delete = Request::service(SaMethod::Delete, ServiceMask::ALL, &service);
    fabric.query(0, delete).unwrap();
    fabric.pass(Duration::from_secs(3600));
    assert_eq!(fabric.administrator.usage().services, 0);
    // A file from another program may contain anything.
    for mad in [
        [0; 256],
        [0xff; 256],
        request(u64::MAX, &McMemberRecord::default()),
    ] {
        fabric.administrator.restore(fabric.now, gid(2), &mad);
        fabric.administrator.restore(fabric.now, gid(1), &mad);
        fabric.deliver();
    }
}

#[test]
fn missing_restored_hosts_free_their_slots() {
    let mut fabric = Fabric::new(3);
    fabric.administrator.config.limits.hosts = 3;
    fabric.restart();
    // Hosts of another network.
    for last in 100..103 {
        let service = ServiceRecord::new(0x1000, gid(last));
        let mad = Request::set_service(&service).emit(TransactionId(1));
        fabric.administrator.restore(fabric.now, gid(last), &mad);
    }
    fabric.pass(SWEEP * 3);
    for client in 0..3 {
        let service = ServiceRecord::new(0x1000, fabric.clients[client].0);
        fabric
            .query(client, Request::set_service(&service))
            .unwrap();
    }
    assert_eq!(fabric.administrator.usage().services, 3);
}

#[test]
fn stranger_does_not_evict_probed_host() {
    let mut fabric = Fabric::new(1);
    let service = ServiceRecord::new(0x1000, gid(2));
    fabric.query(0, Request::set_service(&service)).unwrap();
    fabric.administrator.config.limits.hosts = 1;
    fabric.restart_with_state();
    // The datagram was queued in the socket before the first probe was sent.
    let forged = Request::set_service(&ServiceRecord::new(0x1000, gid(77)));
    let forged = forged.emit(TransactionId(9));
    fabric
        .administrator
        .handle_mad(fabric.now, gid(77), &forged);
    fabric.deliver();
    assert_eq!(fabric.administrator.usage().services, 1);
}

#[test]
fn deferred_requests_survive_second_restart() {
    let mut fabric = Fabric::new(1);
    let service = ServiceRecord::new(0x1000, gid(2));
    fabric.query(0, Request::set_service(&service)).unwrap();
    let requests = fabric.restart_with_state();
    assert_eq!(requests.len(), 1);
    // The host has not responded yet.
    assert_eq!(fabric.administrator.requests(fabric.now), requests);
}

#[test]
fn unprobed_hosts_are_not_silent() {
    let mut fabric = Fabric::new(1);
    let service = ServiceRecord::new(0x1000, gid(2));
    fabric.query(0, Request::set_service(&service)).unwrap();
    let end = fabric.now + FORGETTING + SWEEP * 60;
    while fabric.now < end {
        fabric.now += SWEEP;
        // Requests left over from a flood when the next sweep is due.
        let header = SaHeader::new(
            MadMethod::Get,
            ClassPortInfo::ATTRIBUTE,
            TransactionId(7),
            0,
        );
        let get = header.emit(&[]);
        for _ in 0..MAX_RESPONSES {
            fabric.administrator.handle_mad(fabric.now, gid(99), &get);
        }
        fabric.administrator.handle_timeout(fabric.now);
        fabric.deliver();
    }
    assert_eq!(fabric.administrator.usage().services, 1);
}
