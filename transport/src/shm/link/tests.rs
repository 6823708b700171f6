use super::*;

fn addr(last: u8) -> IpAddr {
    IpAddr::from([127, 2, 0, last])
}

fn listening(at: IpAddr) -> (Links, Arc<Listener>) {
    let listener = Arc::new(hello::listen(at).unwrap());
    let other = Arc::clone(&listener);
    let links = Links::new(at, ShmUsers::default(), Some(listener)).unwrap();
    (links, other)
}

fn poll(links: &mut Links) {
    links.poll_sockets(Instant::now(), |_, _| {});
}

/// Creates two devices with a link.
fn linked(from: IpAddr, to: IpAddr) -> (Links, Links) {
    let (mut server, _) = listening(to);
    let mut client = Links::new(from, ShmUsers::default(), None).unwrap();
    client.reach(Instant::now(), to).unwrap();
    // Three events: connect, HELLO and WELCOME.
    for _ in 0..3 {
        poll(&mut server);
        poll(&mut client);
    }
    assert_eq!((client.counters.up, server.counters.up), (1, 1));
    (client, server)
}

#[test]
fn link_closes_when_address_is_removed() {
    let (own, peer) = (addr(1), addr(2));
    for gone in [own, peer] {
        let (mut client, mut server) = linked(own, peer);
        for links in [&mut client, &mut server] {
            links.check_addresses(|_| true);
            assert_eq!(links.live.len(), 1, "{gone}");
            links.check_addresses(|addr| addr != gone);
            assert_eq!(links.live.len(), 0, "{gone}");
            assert!(links.poll_lost().is_some(), "the device learns of it");
        }
    }
}

#[test]
fn links_set_deadline_for_address_check() {
    let (mut client, _server) = linked(addr(3), addr(4));
    let now = Instant::now();
    client.expire(now);
    let due = client.deadline().unwrap();
    assert!(due > now && due <= now + Duration::from_secs(1));
    // These links are up.
    client.expire(due);
    assert_eq!(client.live.len(), 1);
    assert!(client.deadline().unwrap() > due);
    client.close_link(client.live[0]);
    assert_eq!(client.deadline(), None);
}

#[test]
fn link_name_resolves_after_close() {
    let (_client, mut server) = linked(addr(9), addr(10));
    let slot = server.live[0];
    let name = server.slots[slot].link.as_ref().unwrap().name;
    assert_ne!(name, addr(9));
    assert_eq!(server.peer_of(name), addr(9));
    server.close_link(slot);
    assert_eq!(server.peer_of(name), addr(9));
    assert_eq!(server.peer_of(addr(11)), addr(11), "no name of a link");
}

#[test]
fn look_accepts_single_process() {
    let (mut first, listener) = listening(addr(5));
    let mut second = Links::new(addr(5), ShmUsers::default(), Some(listener)).unwrap();
    let connect = |_| hello::connect(addr(5), addr(6), &ShmUsers::default()).unwrap();
    let _clients: Vec<_> = (0..4).map(connect).collect();
    for n in 1..3 {
        poll(&mut first);
        poll(&mut second);
        assert_eq!((first.live.len(), second.live.len()), (n, n));
    }
}

#[test]
fn full_device_leaves_listener_to_others() {
    let (mut full, listener) = listening(addr(7));
    let mut other = Links::new(addr(7), ShmUsers::default(), Some(listener)).unwrap();
    let connect = || hello::connect(addr(7), addr(8), &ShmUsers::default()).unwrap();
    let mut clients = Vec::new();
    for n in 0..MAX_LINKS {
        clients.push(connect());
        poll(&mut full);
        poll(&mut full);
        assert_eq!(full.counters.up, n as u64 + 1);
    }
    let one_more = connect();
    poll(&mut full);
    poll(&mut other);
    poll(&mut other);
    assert_eq!((full.counters.refused, other.counters.up), (0, 1));
    drop(one_more);
    // Now there is a free slot.
    clients.pop();
    poll(&mut full);
    clients.push(connect());
    poll(&mut full);
    poll(&mut full);
    assert_eq!(full.counters.up, MAX_LINKS as u64 + 1);
}
