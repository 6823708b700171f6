//! The status page of `riserd` in a browser. With `RISER_SCREENSHOT` in the environment, a picture of it
//! under load goes to that file.

use std::path::Path;
use std::thread;
use std::time::Duration;

use riser_tests::browser::Browser;
use riser_tests::metered::{Metered, load};
use riser_tests::programs::{missing, skip};

#[test]
fn the_page_shows_what_the_daemon_does_and_that_it_is_gone() {
    let name = "the_page_shows_what_the_daemon_does_and_that_it_is_gone";
    if let Some(tool) = missing(&["chromium", "timeout", "mkfifo"]) {
        return skip(name, &format!("no {tool}"));
    }
    let picture = std::env::var_os("RISER_SCREENSHOT");
    let mut served = Metered::serve(110);
    let mut browser = Browser::start(&served.pair.dir);
    let _load = load(&served.pair, 180);
    browser.open(&format!("http://{}/", served.metrics), 1240, 900);
    browser.wait_for("$('state').textContent === 'ready'");
    browser.wait_for("/^[1-9]/.test($('t-commands').textContent)");
    browser.wait_for("/µs|ms|s$/.test($('t-p50').textContent)");
    let cell = |table: &str, row: u32, column: u32| {
        format!("$('{table}').tBodies[0].rows[{row}].cells[{column}].textContent")
    };
    assert_eq!(browser.value(&cell("luns", 0, 0)), "t");
    assert_eq!(browser.value(&cell("luns", 0, 2)), "32.0 MiB");
    browser.wait_for(&format!("/^[1-9]/.test({})", cell("luns", 0, 4)));
    browser.wait_for(&format!("{} === 'srp'", cell("sessions", 0, 2)));
    // Names are text, whatever is in them.
    let evil = "fill('sessions', [['<b id=evil>x</b>', '', '', '', '', 0, 0, 0, 0]], [0], '')";
    browser.value(evil);
    assert_eq!(browser.value("$('evil')"), serde_json::Value::Null);
    if let Some(file) = picture {
        thread::sleep(Duration::from_secs(100));
        std::fs::write(Path::new(&file), browser.picture()).unwrap();
    }
    served.pair.kill();
    browser.wait_for("$('state').textContent.startsWith('no answer')");
    served.pair.serve();
    browser.wait_for("$('state').textContent === 'ready'");
    assert!(browser.exceptions.is_empty(), "{:?}", browser.exceptions);
}
