//! Consumers written by hand on the raw client that keep the order of each key while nothing goes wrong.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use lapin::Channel;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use super::raw::{Queue, process};
use super::{AT_ONCE, Job};
use crate::Error;
use crate::record::Record;
use crate::workload::{KEY_HEADER, Message, PAUSES};

fn key_of(delivery: &Delivery) -> Result<String, Error> {
    let headers = delivery.properties.headers().as_ref();
    match headers.and_then(|headers| headers.inner().get(KEY_HEADER)) {
        Some(AMQPValue::LongString(key)) => Ok(key.to_string()),
        _ => Err("a message without a key".into()),
    }
}

/// A fixed number of tasks, each handling the messages of the keys that hash to it one after the other.
pub(super) async fn hash(job: &Job, record: &Arc<Record>) -> Result<(), Error> {
    let mut queue = Queue::consume(job).await?;
    let mut tasks = JoinSet::new();
    let lanes: Vec<_> = (0..AT_ONCE)
        .map(|_| {
            // The prefetch is the bound.
            let (lane, mut deliveries) = mpsc::unbounded_channel();
            let record = Arc::clone(record);
            tasks.spawn(async move {
                while let Some(delivery) = deliveries.recv().await {
                    process(&delivery, &record).await?;
                }
                Ok(())
            });
            lane
        })
        .collect();
    let hasher = RandomState::new();
    for _ in 0..record.plan.len() {
        let delivery = queue.next().await?;
        let at = hasher.hash_one(key_of(&delivery)?) as usize % lanes.len();
        lanes[at].send(delivery)?;
    }
    drop(lanes);
    queue.finish(tasks).await
}

/// What the tasks of the map share.
struct Map {
    record: Arc<Record>,
    permits: Semaphore,
    waiting: Mutex<HashMap<String, VecDeque<Delivery>>>,
    /// Publishes what keeps failing, with confirms.
    parking: Channel,
    parked: String,
}

/// A queue per active key, one task per active key. What fails is tried again in place, then moved away.
pub(super) async fn map(job: &Job, record: &Arc<Record>) -> Result<(), Error> {
    let mut queue = Queue::consume(job).await?;
    let parking = queue.connection.create_channel().await?;
    parking
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    parking
        .queue_declare(
            job.parked().into(),
            QueueDeclareOptions::durable(),
            FieldTable::default(),
        )
        .await?;
    let map = Arc::new(Map {
        record: Arc::clone(record),
        permits: Semaphore::new(AT_ONCE as usize),
        waiting: Mutex::default(),
        parking,
        parked: job.parked(),
    });
    let mut tasks = JoinSet::new();
    for _ in 0..record.plan.len() {
        let delivery = queue.next().await?;
        let key = key_of(&delivery)?;
        {
            let mut keys = map.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(waiting) = keys.get_mut(&key) {
                waiting.push_back(delivery);
                continue;
            }
            keys.insert(key.clone(), VecDeque::new());
        }
        tasks.spawn(Arc::clone(&map).run_key(key, delivery));
        while let Some(ended) = tasks.try_join_next() {
            ended??;
        }
    }
    queue.finish(tasks).await
}

impl Map {
    async fn run_key(self: Arc<Self>, key: String, mut delivery: Delivery) -> Result<(), Error> {
        loop {
            self.process(&delivery).await?;
            let mut keys = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            match keys.get_mut(&key).and_then(VecDeque::pop_front) {
                Some(next) => delivery = next,
                None => {
                    keys.remove(&key);
                    return Ok(());
                }
            }
        }
    }

    async fn process(&self, delivery: &Delivery) -> Result<(), Error> {
        let message: Message = serde_json::from_slice(&delivery.data)?;
        let mut pauses = PAUSES.iter();
        loop {
            let permit = self.permits.acquire().await?;
            if self.record.handle(&message).await {
                // The permit is kept until the acknowledgement, as by the consumer without order.
                delivery.acker.ack(BasicAckOptions::default()).await?;
                return Ok(());
            }
            drop(permit);
            match pauses.next() {
                Some(pause) => tokio::time::sleep(*pause).await,
                None => break,
            }
        }
        self.parking
            .basic_publish(
                "".into(),
                self.parked.as_str().into(),
                BasicPublishOptions::default(),
                &delivery.data,
                delivery.properties.clone(),
            )
            .await?
            .await?;
        delivery.acker.ack(BasicAckOptions::default()).await?;
        Ok(())
    }
}
