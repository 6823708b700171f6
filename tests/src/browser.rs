//! Runs headless Chromium using the DevTools protocol over pipes, which sends JSON messages
//! terminated by a null byte.

#![allow(
    clippy::missing_panics_doc,
    reason = "for tests, which panic when something fails"
)]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use riser_testkit::programs::tool;

/// Maximum time to wait for a page.
const PATIENCE: Duration = Duration::from_secs(60);

/// A browser with a single page. It's stopped on drop, and will exit after several minutes in any
/// case.
pub struct Browser {
    process: Child,
    commands: File,
    responses: BufReader<File>,
    session: Option<String>,
    last: u64,
    /// Uncaught exceptions in the page's code.
    pub exceptions: Vec<String>,
}

impl Browser {
    /// Starts the browser with its files in a new directory in `dir`.
    #[must_use]
    pub fn start(dir: &Path) -> Self {
        let profile = dir.join("browser");
        fs::create_dir(&profile).unwrap();
        let pipe = |name: &str| -> PathBuf {
            let path = profile.join(name);
            tool("mkfifo", [&path]);
            path
        };
        let (commands, responses) = (pipe("commands"), pipe("answers"));
        let process = Command::new("sh")
            .args(["-c", "exec timeout 300 \"$@\" 3<\"$0\" 4>\"$ANSWERS\""])
            .arg(&commands)
            .args(["chromium", "--headless", "--no-sandbox", "--disable-gpu"])
            .args(["--disable-quic", "--no-first-run", "--disable-sync"])
            .args([
                "--disable-background-networking",
                "--disable-component-update",
            ])
            .args(["--remote-debugging-pipe", "--hide-scrollbars"])
            .arg(format!(
                "--user-data-dir={}",
                profile.join("data").display()
            ))
            .env("ANSWERS", &responses)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            process,
            // This must be the same order as used by the shell to open its side of the pipes.
            commands: File::options().write(true).open(&commands).unwrap(),
            responses: BufReader::new(File::open(&responses).unwrap()),
            session: None,
            last: 0,
            exceptions: Vec::new(),
        }
    }

    /// Sends a command and waits for the result.
    fn call(&mut self, method: &str, params: Value) -> Value {
        self.last += 1;
        let mut command = json!({ "id": self.last, "method": method, "params": params });
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&command).unwrap();
        bytes.push(0);
        self.commands.write_all(&bytes).unwrap();
        loop {
            let mut message = Vec::new();
            self.responses.read_until(0, &mut message).unwrap();
            assert_eq!(message.pop(), Some(0), "the browser is gone");
            let message: Value = serde_json::from_slice(&message).unwrap();
            if message["method"] == "Runtime.exceptionThrown" {
                self.exceptions.push(message["params"].to_string());
            }
            if message["id"] == self.last {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
        }
    }

    /// Opens a page using this size in pixels.
    pub fn open(&mut self, url: &str, width: u32, height: u32) {
        let target = self.call("Target.createTarget", json!({ "url": "about:blank" }));
        let target = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = self.call("Target.attachToTarget", target);
        self.session = attached["sessionId"].as_str().map(str::to_owned);
        self.call("Runtime.enable", json!({}));
        let size = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false
        });
        self.call("Emulation.setDeviceMetricsOverride", size);
        self.call("Page.navigate", json!({ "url": url }));
    }

    /// Evaluates a JavaScript expression on the page and returns its value.
    pub fn value(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true });
        let result = self.call("Runtime.evaluate", params);
        let failed = &result["exceptionDetails"];
        assert!(failed.is_null(), "{expression}: {failed}");
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub fn wait_for(&mut self, expression: &str) {
        let until = Instant::now() + PATIENCE;
        let guarded =
            format!("(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()");
        while self.value(&guarded) != true {
            assert!(Instant::now() < until, "never: {expression}");
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Takes a screenshot of the page as a PNG.
    #[must_use]
    pub fn picture(&mut self) -> Vec<u8> {
        let picture = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        base64(picture["data"].as_str().unwrap())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // `timeout` will forward this signal to the browser. If we killed it instead, the browser
        // would keep running.
        let id = self.process.id().to_string();
        let _ = Command::new("kill").args(["-TERM", &id]).status();
        let _ = self.process.wait();
    }
}

/// Decodes base64 (RFC 4648 section 4).
fn base64(text: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => u32::from(c - b'A'),
        b'a'..=b'z' => u32::from(c - b'a') + 26,
        b'0'..=b'9' => u32::from(c - b'0') + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|c| *c != b'=').collect();
    let mut out = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.chunks(4) {
        let word = (0..4).fold(0, |word, n| {
            word << 6 | group.get(n).map_or(0, |c| digit(*c))
        });
        out.extend(&word.to_be_bytes()[1..group.len()]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_is_decoded() {
        for (text, bytes) in [
            ("", ""),
            ("Zg==", "f"),
            ("Zm8=", "fo"),
            ("Zm9vYmFy", "foobar"),
        ] {
            assert_eq!(base64(text), bytes.as_bytes());
        }
    }
}
