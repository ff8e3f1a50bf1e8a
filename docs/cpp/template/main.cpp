#include <torch/torch.h>

#include <lockstep/lockstep.h>

int main() {
  const auto group = lockstep::init_process_group_from_env(lockstep::GroupOptions{}.allow_single(true));
  torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
  net->to(group.device());
  lockstep::DistributedDataParallel model(net, group);
  torch::optim::SGD optimizer(model.parameters(), 0.05);

  torch::manual_seed(group.rank());  // other data on each rank
  double loss_of_all = 0;
  for (int step = 0; step < 50; ++step) {
    const auto x = torch::randn({32, 8}, group.device());
    const auto loss = torch::mse_loss(model(x), x.sum(1, /*keepdim=*/true));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    loss_of_all = lockstep::mean(group, loss.item<double>());
  }
  lockstep::print0(group, "{} ranks, loss {:.4f}", group.size(), loss_of_all);
}
