//! Tests the status page of `riserd` in a browser. If `RISER_SCREENSHOT` is set, a screenshot under
//! load is written to this file.

use std::path::Path;
use std::thread;
use std::time::Duration;

use riser_testkit::metered::{Metered, load};
use riser_testkit::programs::{missing, skip};
use riser_tests::browser::Browser;

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    name.trim().to_owned()
}

#[test]
fn page_shows_activity_and_lost_daemon() {
    let name = "page_shows_activity_and_lost_daemon";
    if let Some(tool) = missing(&["chromium", "timeout", "mkfifo"]) {
        return skip(name, &format!("no {tool}"));
    }
    let picture = std::env::var_os("RISER_SCREENSHOT");
    let mut served = Metered::serve(110);
    let mut browser = Browser::start(&served.pair.dir);
    let _load = load(&served.pair, 180);
    let url = format!("http://{}/", served.metrics);
    browser.open(&url, 1240, 1560);
    browser.wait_for("$('state').textContent === 'ready'");
    browser.wait_for("/^[1-9]/.test($('t-commands').textContent)");
    browser.wait_for("/µs|ms|s$/.test($('t-p50').textContent)");
    let cell = |table: &str, row: u32, column: u32| {
        format!("$('{table}').tBodies[0].rows[{row}].cells[{column}].textContent")
    };
    assert_eq!(browser.value(&cell("luns", 0, 0)), "t");
    assert_eq!(browser.value(&cell("luns", 0, 3)), "32.0 MiB");
    browser.wait_for(&format!("/^[1-9]/.test({})", cell("luns", 0, 5)));
    browser.wait_for(&format!("{} === 'srp'", cell("sessions", 0, 2)));
    // The page must show the host name, addresses, backends and recent events.
    let host = host_name();
    assert_eq!(browser.value("$('host').textContent"), host.as_str());
    assert_eq!(browser.value("document.title"), format!("{host} – riserd"));
    let row = |table: &str, row: u32| {
        format!("[...$('{table}').tBodies[0].rows[{row}].cells].map(c => c.textContent).join('|')")
    };
    let address =
        |port: u16, protocol: &str| format!("{}:{port}|{protocol}|t|listening", served.host);
    assert_eq!(browser.value(&row("portals", 0)), address(3260, "iscsi"));
    assert_eq!(browser.value(&row("portals", 1)), address(5555, "srp"));
    let backend = "$('backends').tBodies[0].rows[0].cells";
    browser.wait_for(&format!(
        "/^[0-9.]+ [MK]iB \\([0-9]+ %\\)$/.test({backend}[3].textContent)"
    ));
    let backend = browser.value(&row("backends", 0)).to_string();
    assert!(
        backend.contains("|file|32.0 MiB|") && backend.ends_with("|0|open\""),
        "{backend}"
    );
    browser.wait_for("$('events').textContent.includes('logged in protocol=srp')");
    // A unit attention is not an error, and its description must be shown.
    let last = |column: u32| format!("$('luns').tBodies[0].rows[0].cells[{column}]");
    assert_eq!(browser.value(&format!("{}.textContent", last(12))), "0");
    browser.wait_for(&format!(
        "/: UNIT ATTENTION: [1-9]/.test({}.title)",
        last(13)
    ));
    let errors = "lunRow({ target: 't', lun: 0, size: 1, errors: 3, attentions: 1, \
                  faults: { 'read: MEDIUM ERROR': 3, 'other: UNIT ATTENTION': 1, 'read: TASK SET FULL': 9 } })[12].join('|')";
    assert_eq!(browser.value(errors), "3||read: MEDIUM ERROR: 3");
    // Problems must be shown in the banner, and units with problems must be first.
    let banner = "banner({ missing: 'backend a: gone\\n1 of 2 workers respond', unsaved: true, \
                  backends: [{ name: 'c', is_filling: true, threshold: 80 }], problems: [\
                  { state: 'NOT SERVED', kind: 'backend', name: 'a', error: 'gone', failing: false }, \
                  { state: 'FAILING', kind: 'backend', name: 'b', error: 'full', failing: true }] })\
                  .map(([text, kind]) => kind + ' ' + text.split(':').slice(0, 2).join(':')).join('|')";
    assert_eq!(
        browser.value(banner),
        "bad NOT SERVED: backend a|warn FAILING: backend b|bad 1 of 2 workers respond|\
         warn FILLING: backend c|warn UNSAVED: the configuration file differs from the running configuration; \
         `riserd save FILE` saves it"
    );
    let ranks = "[{ state: 'FAILING' }, {}].map(lun => rank(lun, undefined)).join()";
    assert_eq!(browser.value(ranks), "0,3");
    // Axis labels must be exact.
    assert_eq!(
        browser.value("marked(22.5e6, ['', ' k', ' M'], 1000)"),
        "22.5 M"
    );
    assert_eq!(browser.value("span(1e-7)"), "100 ns");
    // The history is kept in the daemon, so it must be available immediately after a reload.
    browser.wait_for("samples.length >= 5");
    let before = browser.value("samples[0].time");
    let known = browser.value("samples.length").as_u64().unwrap();
    browser.open(&url, 1240, 1560);
    browser.wait_for("samples.length > 0");
    assert_eq!(browser.value("samples[0].time"), before);
    assert!(browser.value("samples.length").as_u64().unwrap() >= known);
    browser.wait_for("$('events').textContent.includes('logged in protocol=srp')");
    assert_eq!(
        browser.value("document.querySelector('header a').href"),
        format!("{url}metrics")
    );
    // If the host's clock is set back, the page must continue to work and show each sample once.
    browser.value("samples.forEach(sample => sample.time += 3600)");
    let last = browser.value("newest(samples)").as_u64().unwrap();
    browser.wait_for(&format!("newest(samples) > {}", last + 1));
    let each = "new Set(samples.map(sample => sample.number)).size === samples.length";
    assert_eq!(browser.value(each), true);
    // Login events must not replace errors.
    let many = "keep([{ number: 1, routine: false }, \
                ...Array.from({ length: 300 }, (_, i) => ({ number: i + 2, routine: true }))])";
    assert_eq!(browser.value(&format!("{many}[0].number")), 1);
    assert_eq!(browser.value(&format!("{many}.length")), 201);
    // Names must be shown as text and can contain any characters.
    let evil = "fill('sessions', [['<b id=evil>x</b>', '', '', '', '', 0, 0, 0, 0]], [0], '')";
    browser.value(evil);
    assert_eq!(browser.value("$('evil')"), serde_json::Value::Null);
    if let Some(file) = picture {
        thread::sleep(Duration::from_secs(100));
        std::fs::write(Path::new(&file), browser.picture()).unwrap();
    }
    served.pair.kill();
    browser.wait_for("$('state').textContent.startsWith('no response')");
    served.pair.serve();
    browser.wait_for("$('state').textContent === 'ready'");
    assert!(browser.exceptions.is_empty(), "{:?}", browser.exceptions);
}
