//! Tests for the transfer of data and status.

use super::*;

#[test]
fn write_sends_burst_then_solicited_data() {
    let mut rig = Rig::live();
    let id = rig.submit(out(4096, 0));
    let (request, command) = rig.started();
    assert_eq!(request, id);
    // A single segment of immediate data, limited by the first burst; then an R2T.
    assert_eq!(
        (command.bhs[0], command.bhs[1]),
        (0x01, 0xa1),
        "write, simple, final"
    );
    assert_eq!((word(&command.bhs, 20), word(&command.bhs, 24)), (4096, 1));
    assert_eq!((command.immediate, command.unsolicited), (1024, None));
    let itt = word(&command.bhs, 16);
    let mut r2t = bhs(0x31, 0x80, itt);
    put_word(&mut r2t, 20, 9);
    put_word(&mut r2t, 40, 1024);
    put_word(&mut r2t, 44, 3072);
    rig.receive(r2t, &[]);
    let Output::SendData(order) = rig.next() else {
        panic!("no data");
    };
    assert_eq!((order.offset, order.len, order.ttt.0), (1024, 3072, 9));
    rig.session.handle_data_sent(&order);
    rig.respond(itt, 0);
    rig.retire(id);
    let response = rig.expect_completion(id).unwrap();
    assert_eq!((response.status, response.transferred), (0, 4096));
}

#[test]
fn rdma_target_fetches_data_of_many_writes() {
    let start = |rig: &mut Rig| {
        rig.submit(out(4096, 0));
        let (_, command) = rig.started();
        assert_eq!(command.unsolicited, None);
        (command.immediate, word(&command.bhs, 16))
    };
    let mut tcp = Rig::live();
    let mut rdma = Rig::live();
    rdma.session.set_reads(16);
    for n in 0..4 {
        assert_eq!(start(&mut tcp).0, 1024);
        let (immediate, itt) = start(&mut rdma);
        assert_eq!(immediate, if n < 3 { 1024 } else { 0 });
        if n == 3 {
            // No data was sent, so a target without RDMA would solicit all of it.
            let mut r2t = bhs(0x31, 0x80, itt);
            put_word(&mut r2t, 20, 9);
            put_word(&mut r2t, 44, 4096);
            rdma.receive(r2t, &[]);
            let Output::SendData(order) = rdma.next() else {
                panic!("no data");
            };
            assert_eq!((order.offset, order.len), (0, 4096));
        }
    }
}

#[test]
fn r2t_for_sent_data_breaks_connection() {
    let mut rig = Rig::live();
    rig.submit(out(4096, 0));
    let (_, command) = rig.started();
    let mut r2t = bhs(0x31, 0x80, word(&command.bhs, 16));
    put_word(&mut r2t, 20, 9);
    put_word(&mut r2t, 44, 4096);
    rig.receive(r2t, &[]);
    rig.expect_disconnect();
    rig.reconnecting(Down::IscsiFault(IscsiFault::R2t));
}

#[test]
fn data_in_is_ordered_and_carries_status() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    let itt = word(&command.bhs, 16);
    let mut first = bhs(0x25, 0, itt);
    put_word(&mut first, 32, rig.exp_cmd_sn + 10);
    assert_eq!(
        rig.session.place_data(&first, 512),
        Ok(Placement::Into(id, 0))
    );
    rig.session.handle_data_in(&first, 512, true, rig.now);
    let mut last = bhs(0x25, 0x83, itt);
    put_word(&mut last, 24, 102);
    put_word(&mut last, 36, 1);
    put_word(&mut last, 40, 512);
    put_word(&mut last, 44, 12);
    assert_eq!(
        rig.session.place_data(&last, 513),
        Err(IscsiFault::DataRange)
    );
    let mut again = last;
    put_word(&mut again, 36, 0);
    assert_eq!(
        rig.session.place_data(&again, 500),
        Err(IscsiFault::DataOrder)
    );
    assert_eq!(
        rig.session.place_data(&last, 500),
        Ok(Placement::Into(id, 512))
    );
    rig.session.handle_data_in(&last, 500, true, rig.now);
    rig.retire(id);
    let want = CommandResponse {
        status: 0,
        sense: None,
        transferred: 1012,
        overflow: 0,
    };
    assert_eq!(rig.expect_completion(id), Ok(want));
    assert_eq!(rig.session.exp_stat_sn().0, 103);
    // Further data for it is discarded.
    assert_eq!(rig.session.place_data(&last, 500), Ok(Placement::Discard));
    let strange = bhs(0x25, 0, 0x0001_0009);
    assert!(matches!(
        rig.session.place_data(&strange, 4),
        Err(IscsiFault::UnknownTask(_))
    ));
}

#[test]
fn missing_data_in_reduces_transferred_length() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    rig.respond(word(&command.bhs, 16), 0);
    rig.retire(id);
    assert_eq!(rig.expect_completion(id).unwrap().transferred, 0);
}

#[test]
fn command_window_delays_commands() {
    let mut rig = Rig::connecting(config());
    rig.window = 1;
    rig.log_in();
    let a = rig.submit(READ);
    let b = rig.submit(READ);
    let (first, command) = rig.started();
    assert_eq!(first, a);
    rig.expect_idle();
    rig.respond(word(&command.bhs, 16), 0);
    assert_eq!(rig.next(), Output::Retire(a));
    let (second, command) = rig.started();
    assert_eq!((second, word(&command.bhs, 24)), (b, 2));
}

#[test]
fn duplicate_response_is_counted_and_dropped() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    let itt = word(&command.bhs, 16);
    rig.respond(itt, 0);
    rig.retire(id);
    assert!(rig.expect_completion(id).is_ok());
    rig.expect_idle();
    rig.respond(itt, 0);
    assert_eq!(rig.next(), Output::Event(SessionEvent::Stale));
    rig.expect_idle();
}

#[test]
fn sense_is_returned_and_busy_is_retried() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    rig.respond(word(&command.bhs, 16), 0x08);
    rig.retire(id);
    rig.expect_idle();
    rig.advance(10 * MS);
    let (_, command) = rig.started();
    let mut pdu = bhs(0x21, 0x82, word(&command.bhs, 16));
    pdu[3] = 2;
    put_word(&mut pdu, 44, 1024);
    let mut data = vec![0, 18];
    data.extend([0x70, 0, 3, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x11, 0, 0, 0, 0, 0]);
    rig.receive(pdu, &data);
    rig.retire(id);
    let response = rig.expect_completion(id).unwrap();
    assert_eq!((response.status, response.transferred), (2, 0));
    assert_eq!(response.sense.unwrap().len(), 18);
}

#[test]
fn reject_only_fails_its_command() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    let mut reject = bhs(0x3f, 0x80, 0xffff_ffff);
    reject[2] = 9;
    rig.receive(reject, &command.bhs);
    rig.retire(id);
    let error = rig.expect_completion(id).unwrap_err();
    assert!(matches!(error, RequestError::Rejected(_)), "{error}");
    rig.expect_idle();
    rig.receive(reject, b"short");
    rig.expect_disconnect();
}

/// Otherwise, a busy path would fail all of its checks.
#[test]
fn probe_overtakes_queued_data() {
    let mut rig = Rig::live();
    for start in 0..8 {
        rig.submit(out(512, 100 * start));
    }
    let (first, command) = rig.started();
    for _ in 1..4 {
        rig.started();
    }
    let mut probe = rig.spec(READ);
    probe.retry = Retry::Probe;
    let probe = rig.session.submit(probe, rig.now).unwrap();
    rig.respond(word(&command.bhs, 16), 0);
    rig.retire(first);
    rig.expect_completion(first).unwrap();
    assert_eq!(rig.started().0, probe);
}

/// RFC 7143 clause 7.8: the immediate data of a discarded command is recovered by retrying the
/// task.
#[test]
fn rejected_digest_repeats_write() {
    // DATA DIGEST ERROR, WAITING FOR LOGOUT
    for reason in [0x02, 0x0c] {
        let mut rig = Rig::live();
        let write = rig.submit(out(512, 0));
        let (_, command) = rig.started();
        let mut reject = bhs(0x3f, 0x80, u32::MAX);
        reject[2] = reason;
        rig.receive(reject, &command.bhs);
        rig.expect_disconnect();
        let Output::Event(SessionEvent::Reconnecting(Down::IscsiFault(fault))) = rig.next() else {
            panic!("no new login");
        };
        assert!(matches!(fault, IscsiFault::Rejected(_)));
        rig.advance(SEC);
        rig.connects_to(None);
        rig.log_in();
        assert_eq!(rig.started().0, write);
    }
    // INVALID PDU FIELD only affects the command.
    let mut rig = Rig::live();
    let write = rig.submit(out(512, 0));
    let (_, command) = rig.started();
    let mut reject = bhs(0x3f, 0x80, u32::MAX);
    reject[2] = 0x09;
    rig.receive(reject, &command.bhs);
    rig.retire(write);
    rig.expect_completion(write).unwrap_err();
}

/// Linux does the same after DID_ERROR.
#[test]
fn failed_response_repeats_request() {
    let mut rig = Rig::connecting(SessionConfig {
        max_attempts: 32,
        ..config()
    });
    rig.log_in();
    let read = rig.submit((DataLen::In(512), Effect::Read { start: 0, end: 1 }));
    for attempt in 0..6 {
        let (id, command) = rig.started();
        assert_eq!(id, read);
        let mut response = bhs(0x21, 0x80, word(&command.bhs, 16));
        match attempt {
            // TARGET FAILURE
            0..5 => response[2] = 1,
            // GOOD, without data.
            _ => {
                response[1] |= 2;
                put_word(&mut response, 44, 512);
            }
        }
        rig.receive(response, &[]);
        rig.retire(read);
        rig.advance(SEC);
    }
    assert_eq!(rig.expect_completion(read).unwrap().transferred, 0);
    // A command with another effect is not retried.
    let other = rig.submit((DataLen::None, Effect::Other));
    let (_, command) = rig.started();
    let mut response = bhs(0x21, 0x80, word(&command.bhs, 16));
    response[2] = 1;
    rig.receive(response, &[]);
    rig.retire(other);
    let failed = rig.expect_completion(other);
    assert_eq!(failed, Err(RequestError::TargetFailure(1)));
}

/// If a target reports success before receiving the data of a write, it has not actually written
/// it.
#[test]
fn good_write_counts_only_solicited_data() {
    let mut rig = Rig::live();
    let write = rig.submit(out(4096, 0));
    let (request, command) = rig.started();
    rig.respond(word(&command.bhs, 16), 0);
    rig.retire(request);
    let unsolicited = 1024;
    assert_eq!(
        rig.expect_completion(write).unwrap().transferred,
        unsolicited
    );
}
