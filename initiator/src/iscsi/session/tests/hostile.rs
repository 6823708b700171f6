//! Tests with targets that violate the protocol.

use super::*;

/// CVE-2026-99154: a task tag that is negative as a signed number is a normal tag that matches none
/// of our commands, regardless of its lower half.
#[test]
fn cve_2026_99154_negative_task_tags_are_unknown() {
    let high = [0x8000_0000, 0xffff_0000, 0xfffe_0000, 0x8001_0000];
    for tag in high.into_iter().flat_map(|half| [half, half | 1, half | 3]) {
        for opcode in [0x21, 0x25, 0x31] {
            let mut rig = Rig::live();
            let ids = [(); 4].map(|()| rig.submit(READ));
            let commands = [(); 4].map(|()| rig.started());
            let used = commands.map(|(_, command)| word(&command.bhs, 16));
            assert!(
                used.iter().all(|itt| (*itt).cast_signed() >= 0),
                "{used:x?}"
            );
            let pdu = bhs(opcode, 0x80, tag);
            if opcode == 0x25 {
                let placed = rig.session.place_data(&pdu, 512);
                assert_eq!(placed, Err(IscsiFault::UnknownTask(Itt(tag))));
            }
            rig.receive(pdu, &[]);
            rig.expect_disconnect();
            rig.reconnecting(Down::IscsiFault(IscsiFault::UnknownTask(Itt(tag))));
            rig.log_in();
            // All of them are retried.
            for id in ids {
                assert_eq!(rig.started().0, id, "{opcode:#x}, {tag:#x}");
            }
        }
    }
}

/// CVE-2023-2162: a session is closed at any point, while the target continues to use it. Each
/// request completes once, and later messages do not find it.
#[test]
fn cve_2023_2162_closed_session_is_not_used() {
    const ENDS: [fn(&mut IscsiSession, Instant); 2] = [
        |session, now| session.close(now),
        |session, now| session.handle_broken(now),
    ];
    for (end, progress) in ENDS
        .into_iter()
        .flat_map(|end| (0..5).map(move |n| (end, n)))
    {
        let mut rig = Rig::connecting(SessionConfig {
            reconnect: false,
            ..config()
        });
        rig.log_in();
        let ids = [rig.submit(READ), rig.submit(out(512, 0)), rig.submit(READ)];
        let tags = [(); 3].map(|()| word(&rig.started().1.bhs, 16));
        let mut completed = Vec::new();
        if progress > 0 {
            rig.respond(tags[0], 0);
        }
        if progress > 1 {
            rig.retire(ids[0]);
        }
        if progress > 2 {
            let mut r2t = bhs(0x31, 0x80, tags[1]);
            put_word(&mut r2t, 20, 7);
            put_word(&mut r2t, 44, 64);
            rig.receive(r2t, &[]);
        }
        if progress > 3 {
            rig.advance(3 * SEC);
        }
        end(&mut rig.session, rig.now);
        let mut is_closed = false;
        for round in 0..40 {
            while let Some(output) = rig.session.poll_output() {
                match output {
                    Output::Complete(id, _) => completed.push(id),
                    Output::Event(SessionEvent::Closed(_)) => is_closed = true,
                    Output::Retire(id) => rig.session.handle_retired(id, rig.now),
                    Output::Disconnect => rig.session.handle_disconnected(rig.now),
                    other => assert!(!is_closed, "{other:?} after the end"),
                }
            }
            // PDUs in flight are still received.
            for tag in tags {
                let data = bhs(0x25, 0x81, tag);
                if rig.session.place_data(&data, 16).is_ok() {
                    rig.session.handle_data_in(&data, 16, true, rig.now);
                }
                rig.respond(tag, 0);
            }
            for id in ids {
                assert!(
                    !is_closed || rig.session.emit_command(id).is_none(),
                    "{round}"
                );
            }
            rig.session.handle_timeout(rig.now);
            rig.session.handle_progress(|_| true, |_| true, rig.now);
            rig.session.handle_broken(rig.now);
            rig.now += SEC;
        }
        completed.sort();
        assert_eq!((is_closed, completed), (true, ids.to_vec()), "{progress}");
        assert_eq!(rig.session.next_deadline(), None);
        let late = rig.session.submit(rig.spec(READ), rig.now);
        assert_eq!(late, Err(SubmitError::Closed));
    }
}

/// CVE-2026-18724 to CVE-2026-18728: names of targets are used in paths and on terminals.
#[test]
fn cve_2026_18724_to_2026_18728_target_names_are_checked() {
    let listed = |text: &[u8]| {
        let mut config = config();
        config.target = None;
        let mut rig = Rig::connecting(config);
        rig.log_in();
        let wish = rig.sent();
        rig.receive(bhs(0x24, 0x80, word(&wish.bhs, 16)), text);
        rig.next()
    };
    for name in [
        "iqn.2026-01.a:../../etc/shadow",
        "iqn.2026-01.a:x/y",
        "iqn.2026-01.a:x y",
        "iqn.2026-01.a:x;reboot",
        "iqn.2026-01.a:$(id)",
        "iqn.2026-01.a:%2e%2e",
        "../x",
        ".",
    ] {
        let text = format!(
            "TargetName={name}\0TargetAddress=10.0.0.1:3260,1\0\
             TargetName=iqn.2026-01.a:good\0TargetAddress=10.0.0.2:3260,1\0"
        );
        let Output::Found(found) = listed(text.as_bytes()) else {
            panic!("{name:?}");
        };
        let names: Vec<_> = found.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["iqn.2026-01.a:good"], "{name:?}");
        assert_eq!(found[0].addresses.len(), 1, "{name:?}");
    }
    // Control characters are not allowed in any text of the protocol.
    for byte in (1..0x20).chain([0x7f]) {
        for key in ["TargetName=iqn.2026-01.a:x", "TargetAddress=10.0.0.1"] {
            let text = [
                b"TargetName=iqn.2026-01.a:y\0",
                key.as_bytes(),
                &[byte],
                b"z\0",
            ]
            .concat();
            assert_eq!(listed(&text), Output::Disconnect, "{key}{byte:#x}");
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    Submit(u8),
    Respond(u8, u8),
    SolicitData(u8),
    Retire(u8),
    Advance(u16),
    Garbage(u8, Vec<u8>),
    Forged(Forged),
    Break,
    Connect(bool),
    RespondTmf(u8),
    Pong,
    Close,
}

/// A PDU of a target that violates the protocol, with some valid fields.
#[derive(Clone, Debug)]
struct Forged {
    /// The command with its tag.
    which: u8,
    /// Bit mask of valid fields.
    right: u8,
    /// Length of its data.
    len: u8,
    bhs: [u64; 6],
}

fn forged() -> impl Strategy<Value = Forged> {
    let bhs = prop::array::uniform6(any::<u64>());
    (any::<[u8; 3]>(), bhs).prop_map(|([which, right, len], bhs)| Forged {
        which,
        right,
        len,
        bhs,
    })
}

fn action() -> impl Strategy<Value = Action> {
    one_of![
        4 => forged().prop_map(Action::Forged),
        6 => (0u8..4).prop_map(Action::Submit),
        6 => (any::<u8>(), 0u8..4).prop_map(|(i, s)| Action::Respond(i, s)),
        2 => any::<u8>().prop_map(Action::SolicitData),
        6 => any::<u8>().prop_map(Action::Retire),
        2 => (0u16..8000).prop_map(Action::Advance),
        1 => (any::<u8>(), proptest::collection::vec(any::<u8>(), 0..60))
            .prop_map(|(opcode, bytes)| Action::Garbage(opcode, bytes)),
        1 => Just(Action::Break),
        4 => prop::bool::weighted(0.8).prop_map(Action::Connect),
        2 => any::<u8>().prop_map(Action::RespondTmf),
        2 => Just(Action::Pong),
    ]
}

/// State known to the session's owner and to its target.
struct Model {
    rig: Rig,
    /// Accepted and incomplete requests.
    open: HashSet<RequestId>,
    /// Started and unretired requests, with their tags.
    exposed: HashMap<RequestId, u32>,
    retiring: Vec<RequestId>,
    tmfs: Vec<u32>,
    pings: Vec<u32>,
    connecting: bool,
}

impl Model {
    fn new() -> Self {
        let now = Instant::now();
        let mut model = Self {
            rig: Rig {
                session: IscsiSession::new(config(), now),
                now,
                stat_sn: 100,
                exp_cmd_sn: 1,
                window: 64,
                tags: Vec::new(),
            },
            open: HashSet::new(),
            exposed: HashMap::new(),
            retiring: Vec::new(),
            tmfs: Vec::new(),
            pings: Vec::new(),
            connecting: false,
        };
        model.drain();
        model
    }

    fn pick(&self, which: u8) -> Option<(RequestId, u32)> {
        let mut all: Vec<_> = self.exposed.iter().map(|(id, itt)| (*id, *itt)).collect();
        all.retain(|(id, _)| !self.retiring.contains(id));
        all.sort_unstable();
        (!all.is_empty()).then(|| all[usize::from(which) % all.len()])
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Submit(kind) => {
                let kinds = [
                    READ,
                    (DataLen::None, Effect::Other),
                    out(4096, 0),
                    out(512, 4),
                ];
                let spec = RequestSpec {
                    lun: [0; 8],
                    attr: TaskAttr::Simple,
                    cdb: Cdb::new(&[0; 6]).unwrap(),
                    len: kinds[usize::from(kind)].0,
                    deadline: self.rig.now + 30 * SEC,
                    retry: Retry::Standard,
                    effect: kinds[usize::from(kind)].1,
                };
                if let Ok(id) = self.rig.session.submit(spec, self.rig.now) {
                    assert!(self.open.insert(id));
                }
            }
            Action::Respond(which, status) => {
                if let Some((_, itt)) = self.pick(which) {
                    self.rig.respond(itt, [0, 2, 8, 0x28][usize::from(status)]);
                }
            }
            Action::SolicitData(which) => {
                if let Some((_, itt)) = self.pick(which) {
                    let mut r2t = bhs(0x31, 0x80, itt);
                    put_word(&mut r2t, 20, 5);
                    put_word(&mut r2t, 40, 1024);
                    put_word(&mut r2t, 44, 1024);
                    self.rig.receive(r2t, &[]);
                }
            }
            Action::Retire(which) if !self.retiring.is_empty() => {
                let at = usize::from(which) % self.retiring.len();
                let id = self.retiring.remove(at);
                self.exposed.remove(&id);
                self.rig.session.handle_retired(id, self.rig.now);
            }
            Action::Advance(ms) => self.rig.advance(u32::from(ms) * MS),
            Action::Garbage(opcode, bytes) => {
                let mut pdu = [0; BHS_LEN];
                let len = bytes.len().min(BHS_LEN);
                pdu[..len].copy_from_slice(&bytes[..len]);
                pdu[0] = opcode;
                let frame = Frame {
                    bhs: &pdu,
                    ahs: &[],
                    data: &bytes[len..],
                    is_intact: true,
                };
                let _ = self.rig.session.place_data(&pdu, 100);
                self.rig.session.handle_pdu(&frame, self.rig.now);
            }
            Action::Forged(forged) => self.forge(&forged),
            Action::Break => self.rig.session.handle_broken(self.rig.now),
            Action::Connect(true) if self.connecting => {
                self.connecting = false;
                self.rig.log_in();
            }
            Action::Connect(false) if self.connecting => {
                self.connecting = false;
                let error = ConnectError::Unreachable;
                self.rig.session.handle_connect_failed(error, self.rig.now);
            }
            Action::RespondTmf(status) if !self.tmfs.is_empty() => {
                let mut pdu = bhs(0x22, 0x80, self.tmfs.remove(0));
                pdu[2] = status % 7;
                self.rig.receive(pdu, &[]);
            }
            Action::Pong if !self.pings.is_empty() => {
                let itt = self.pings.remove(0);
                self.rig.receive(bhs(0x20, 0x80, itt), &[]);
            }
            Action::Close => self.rig.session.close(self.rig.now),
            _ => {}
        }
        self.drain();
    }

    /// Passes a PDU to the session like its owner: data of a command is placed first.
    fn forge(&mut self, forged: &Forged) {
        let mut pdu = [0; BHS_LEN];
        for (at, word) in forged.bhs.iter().enumerate() {
            pdu[8 * at..][..8].copy_from_slice(&word.to_le_bytes());
        }
        let is_right = |bit: u8| forged.right & 1 << bit != 0;
        if is_right(0) {
            // Opcodes of a target, which are consecutive except for the last three.
            let opcodes = [
                0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x25, 0x26, 0x31, 0x32, 0x3f,
            ];
            pdu[0] = opcodes[usize::from(pdu[0]) % opcodes.len()];
        }
        if let Some((_, itt)) = self.pick(forged.which).filter(|_| is_right(1)) {
            put_word(&mut pdu, 16, itt);
        }
        if is_right(2) {
            put_word(&mut pdu, 20, u32::MAX);
        }
        if is_right(3) {
            put_word(&mut pdu, 24, self.rig.stat_sn);
        }
        if is_right(4) {
            put_word(&mut pdu, 28, self.rig.exp_cmd_sn);
            put_word(&mut pdu, 32, self.rig.exp_cmd_sn + self.rig.window);
        }
        if is_right(5) {
            // Low offsets and numbers.
            for at in [36, 40, 44] {
                let value = word(&pdu, at);
                put_word(&mut pdu, at, value % 8192);
            }
        }
        if pdu[0] & 0x3f == 0x25 && forged.len > 0 {
            return self.forge_data(&pdu, u32::from(forged.len));
        }
        let data = vec![forged.which; forged.len.into()];
        let frame = Frame {
            bhs: &pdu,
            ahs: &[],
            data: &data,
            is_intact: !is_right(6),
        };
        self.rig.session.handle_pdu(&frame, self.rig.now);
    }

    /// Data may only be placed if an outstanding command has room for it.
    fn forge_data(&mut self, pdu: &[u8; BHS_LEN], len: u32) {
        match self.rig.session.place_data(pdu, len) {
            Err(fault) => return self.rig.session.handle_fault(fault),
            Ok(Placement::Into(request, offset)) => {
                assert!(self.exposed.contains_key(&request), "its memory is here");
                assert!(!self.retiring.contains(&request), "its memory is going");
                assert!(offset.checked_add(len).is_some_and(|end| end <= 1024));
            }
            Ok(Placement::Discard) => {}
        }
        let now = self.rig.now;
        self.rig.session.handle_data_in(pdu, len, true, now);
    }

    fn drain(&mut self) {
        while let Some(output) = self.rig.session.poll_output() {
            match output {
                Output::Connect(_) => self.connecting = true,
                Output::Send(pdu) => match pdu.bhs[0] & 0x3f {
                    0x02 => self.tmfs.push(word(&pdu.bhs, 16)),
                    0x00 if word(&pdu.bhs, 16) != 0xffff_ffff => {
                        self.pings.push(word(&pdu.bhs, 16));
                    }
                    _ => {}
                },
                Output::Start(id) => {
                    assert!(self.open.contains(&id));
                    let command = self.rig.session.emit_command(id);
                    if let Some(command) = command {
                        self.rig.exp_cmd_sn += 1;
                        let itt = word(&command.bhs, 16);
                        let before = self.exposed.insert(id, itt);
                        assert!(before.is_none(), "memory is exposed once");
                    }
                }
                Output::SendData(order) => {
                    assert!(self.exposed.contains_key(&order.request));
                    self.rig.session.handle_data_sent(&order);
                }
                Output::Retire(id) => self.retiring.push(id),
                Output::Disconnect => {
                    self.connecting = false;
                    self.exposed.clear();
                    self.retiring.clear();
                    self.tmfs.clear();
                    self.pings.clear();
                    self.rig.session.handle_disconnected(self.rig.now);
                }
                Output::Complete(id, _) => {
                    assert!(self.open.remove(&id), "completed once");
                    assert!(!self.exposed.contains_key(&id), "memory is back");
                }
                Output::FullFeature(_) | Output::Found(_) | Output::Event(_) => {}
            }
        }
    }
}

/// After any history, each accepted request has completed exactly once, and never while its memory
/// was in use.
fn run(actions: Vec<Action>) {
    let mut model = Model::new();
    for action in actions {
        model.act(action);
    }
    model.act(Action::Close);
    model.act(Action::Advance(1000));
    assert!(model.open.is_empty(), "{} left", model.open.len());
    assert_eq!(model.rig.session.state(), SessionState::Closed);
}

proptest! {
    #[test]
    fn requests_complete_exactly_once(actions in proptest::collection::vec(action(), 1..200)) {
        run(actions);
    }
}

#[test]
fn hostile_iscsi_target() {
    bolero::check!(name = "hostile_iscsi_target").for_each(|bytes: &[u8]| {
        if let Some(((), actions)) = fuzz::history(&Just(()), &action(), bytes) {
            run(actions);
        }
    });
}
