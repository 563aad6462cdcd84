//! What disturbs a run.

use std::sync::Arc;

use crate::fleet::Fleet;
use crate::options::Chaos;
use crate::private::PrivateBroker;
use crate::publish::Pace;

/// Disturbs once, and says what was done.
pub(crate) async fn disturb(
    chaos: Chaos,
    number: u64,
    fleet: &mut Fleet,
    broker: Option<&Arc<PrivateBroker>>,
    pace: &Pace,
) -> Result<String, String> {
    match (chaos, broker) {
        (Chaos::None, _) => Ok("nothing".to_owned()),
        (Chaos::Kill, _) => {
            let victim = fastrand::usize(..fleet.len());
            fleet.kill(victim).await?;
            Ok(format!("instance {victim} killed and replaced"))
        }
        (Chaos::Roll, _) => {
            let next = usize::try_from(number).unwrap_or(usize::MAX) % fleet.len();
            fleet.roll(next).await?;
            Ok(format!("instance {next} drained and replaced"))
        }
        (Chaos::Close, Some(broker)) => {
            let _nothing_under_way = pace.pause().await;
            on(broker, PrivateBroker::close_all_connections).await?;
            Ok("all connections closed by the broker".to_owned())
        }
        (Chaos::Broker, Some(broker)) => {
            let _nothing_under_way = pace.pause().await;
            on(broker, PrivateBroker::stop_app).await?;
            on(broker, PrivateBroker::start_app).await?;
            Ok("broker stopped and started".to_owned())
        }
        (Chaos::Close | Chaos::Broker, None) => unreachable!("a private broker was started for it"),
    }
}

/// Runs a command of the broker, which takes a second or more.
async fn on(broker: &Arc<PrivateBroker>, command: fn(&PrivateBroker)) -> Result<(), String> {
    let broker = Arc::clone(broker);
    let done = tokio::task::spawn_blocking(move || command(&broker)).await;
    done.map_err(|_| "the private broker did not do as it was told; see above".to_owned())
}
